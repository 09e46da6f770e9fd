"""Solver: the best order of computation for given costs, a memory cap and placements, with a certified lower bound.

`solved_plan` is the entry point; `order_search` combines `starting_orders`, `list_policies`, `periodic` orders,
`order_annealing` and `constraint_programming` (OR-Tools, optional) on a `search_problem`; `recompute_choices` and
`recompute_offload_or_lend` make room. `order_lower_bounds` has the lower bounds of an `order_problem`,
`check_order_certificate` verifies them. `stage_cuts` cuts layers, `noise` minds durations that vary. Imports
`compiler`, `plan`, `trace`, `schedules`, `simulation`, `ir`, `files` and `errors`.
"""

from quintsched.solve.check_order_certificate import Certificate, certify
from quintsched.solve.solved_plan import Solution, solve
from quintsched.solve.stage_cuts.layer_costs import LayerCosts
from quintsched.solve.stage_cuts.stage_layout import CutStages, cut_stages

__all__ = ["Certificate", "CutStages", "LayerCosts", "Solution", "certify", "cut_stages", "solve"]
