"""Plans as text: one rank's list, the surroundings of a fault, aligned tables (`listing`), a collective's grid
(`collective_grid`).

Imports `collectives` and `ir` alone, so that a proof can show its counter-example.
"""
