"""Plans as text: one rank's list, the surroundings of a fault, aligned tables (`plan_listing`), a collective's grid
(`collective_grid`), a mesh (`mesh_cube`) and its process groups (`process_groups`).

Imports only `collectives` and `ir`, so that proofs can print counter-examples.
"""
