"""Start of every step: the number of samples, their shapes and global indices, agreed by all ranks of a pipeline.

`step_header` broadcasts them from the first stage's rank, `unit_samples` describes each unit of a step,
`agree_on_unit_shapes` determines them, `engine_plans` has the plan for a number of microbatches. `unit_output_shapes`
traces shapes, `weights_changed_in_forward` refuses or compares these, `block_examination_results` has what
examinations find.
Imports `stage`, `guards`, `losses`, `parallel`, `user_objects`, `blocks`, `autograd`, `agreement` and `comm`.
"""
