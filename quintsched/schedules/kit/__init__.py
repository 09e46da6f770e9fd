"""Tools to write schedules: registry, phases, greedy list scheduling, building blocks of V shapes, constraints.

Imports `ir` and `simulation.costs`. The schedules themselves are one folder up, one file each.
"""
