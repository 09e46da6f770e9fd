"""What is settled at the beginning of every step: how many samples there are, in which shapes, numbered from where.

`header` is what the first stage's rank says to its pipeline, `units` what each unit of a step is, `settle` finds them,
`plans` has the plan for a number of microbatches. And what comes of one: `outputs` joins those of an evaluation,
`explain` says where an error arose. Imports `stage`, `parallel`, `blocks` and `comm`.
"""
