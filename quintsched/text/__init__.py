"""Plans as text: lists of a rank's instructions, excerpts around a fault, aligned tables (`listing`), and the grid of
a collective (`collective_grid`).

Imports only `collectives` and `ir`, so that proofs can print counter-examples.
"""
