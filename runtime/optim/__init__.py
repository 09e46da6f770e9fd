"""Optimizers: as the caller gives them, and over the parameters that each rank steps.

`given` normalizes the argument, and rebuilds optimizers over other parameters; `builds` decides which parameters must
stay whole, and builds a rank's optimizers over its shards; `chained` combines several, with their schedulers;
`gathered_steps` gathers whole matrices over tp for a step. `examine.optimizers` finds the dependencies of an update.
Imports `stage`, `examine`, `agreement`, `objects`, `parallel`, `blocks`, `comm`, `settings`.
"""
