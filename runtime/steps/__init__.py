"""Start of every step: the number of samples, their shapes and global indices, agreed by all ranks of a pipeline.

`header` broadcasts them from the first stage's rank, `units` describes each unit of a step, `settle` determines them,
`plans` has the plan for a number of microbatches. For results, `outputs` joins those of an evaluation, and `explain`
locates an error of user code. Imports `stage`, `parallel`, `blocks` and `comm`.
"""
