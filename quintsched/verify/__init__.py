"""Proof that a plan is sound, point by point, or a counter-example.

`soundness` is the whole proof: well-formed (`wellformed`; `microbatch_routes`: every route visits the whole model),
complete, data flow (`values_made_once_and_used`), channels, `deadlock`, `planned_collectives`, memory. `equivalence`
proves a plan by algebra instead: a `symbolic_run` of it, and of its collectives (`symbolic_collective`), must compute
the sequential gradient of `algebraic_training_model`. Imports `text`, `simulation`, `planned_collectives`, `graph` and
`ir`.
"""
