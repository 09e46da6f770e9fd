"""Tools to write schedules with: the registry, phases, greedy lists, building blocks of V shapes, constraints.

Public: `list_schedule`, a list schedule by priorities under a memory cap, and the placements `linear`, `loop` and `v`.
Imports `ir` and `simulation.costs`. The schedules themselves are one folder up, one to a file.
"""

from quintsched.schedules.kit.order_from_own_priorities import HALVES, WHOLE, backwards_first, list_schedule
from quintsched.schedules.kit.stage_placements import linear, loop, v

__all__ = ["HALVES", "WHOLE", "backwards_first", "linear", "list_schedule", "loop", "v"]
