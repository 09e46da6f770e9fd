"""What users give as an optimizer, and what of it each rank steps.

`given` reads what is given, and makes optimizers again over other parameters; `builds` settles which parameters must
stay whole, and makes the optimizers of a rank over its shards; `chained` has several in one, and their schedulers;
`gathered_steps` lets ranks of tp step whole matrices. What an update depends on, `examine.optimizers` says. Imports
`examine`, `parallel`, `blocks`, `comm`, `settings`.
"""
