"""Start of every step: the number of samples, their shapes and global indices, agreed by all ranks of a pipeline.

`step_header` broadcasts them from the first stage's rank, `units` describes each unit of a step, `settle_step`
determines them, `engine_plans` has the plan for a number of microbatches. For results, `join_outputs` joins those of an
evaluation, and `error_location` locates an error of user code. `block_findings` has what examinations find in blocks.
Imports `stage`, `guards`, `losses`, `parallel`, `objects`, `blocks`, `autograd`, `agreement` and `comm`.
"""
