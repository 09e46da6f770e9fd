"""Plans as text: one rank's list, the surroundings of a fault, aligned tables (`listing`), a collective's grid
(`collective_grid`); strategies, times and bytes in words (`quantities`).

Imports `collectives`, `descriptions` and `ir` alone, so that a proof can show its counter-example.
"""
