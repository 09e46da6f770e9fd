"""What schedules are written with: the registry, phases, greedy lists, building blocks of V shapes, constraints.

Imports `ir` and `simulation.costs`. The schedules themselves are one folder up, one to a file.
"""
