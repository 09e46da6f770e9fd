"""Time and memory of a plan: the event graph run under a cost model, and what ranks hold at their fullest.

`simulator` times a plan by `costs` (`cost_forms`: what they may look like; `durations`: of each instruction),
`activation_memory` and `state_memory` count what is resident on a rank, `time_grid` lays a simulation on a raster.
Imports `graph`, `ir` and `files`.
"""
