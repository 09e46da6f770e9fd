"""Time and memory of a plan: the event graph timed under a cost model, and the peak memory of ranks.

`simulator` times a plan by `costs` (`cost_forms`: their forms in files; `instruction_durations`: time per
instruction), `simulated_activation_memory` and `simulated_weights_grads_optimizer_memory` compute peaks per rank,
`time_grid` prints a simulation as text, or the `time_window` of it that is asked for. Imports `graph`, `ir` and
`files`.
"""
