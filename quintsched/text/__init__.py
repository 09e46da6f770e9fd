"""Plans as text: one rank's list, the surroundings of a fault, aligned tables (`listing`), a collective's grid
(`collective_grid`), a mesh (`mesh_cube`) and its process groups (`process_groups`).

Imports `collectives` and `ir` alone, so that a proof can show its counter-example.
"""
