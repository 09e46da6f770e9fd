"""Optimizers: as the caller gives them, and over the parameters that each rank steps.

`accepted_optimizer_forms` normalizes the argument, and rebuilds optimizers over other parameters; `build_optimizers`
decides which parameters must stay whole, and builds a rank's optimizers over its shards; `chained_optimizers`
combines several, with their schedulers; `step_on_gathered_matrices` gathers whole matrices over tp for a step.
`tensors_each_optimizer_needs` finds the dependencies of an update. Imports `stage`, `agreement`, `user_objects`,
`parallel`, `blocks`, `comm`, `settings`.
"""
