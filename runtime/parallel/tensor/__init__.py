"""Tensor and sequence parallelism: choice of layers to cut, sharded layers, vocabulary-parallel loss.

`apply_tensor_parallel` cuts a module and `whole_model_cuts` a model, by `cut_rules`, into the layers of
`column_row_layers`; `parameter_shards` records how each parameter was cut. Imports `expert`, `blocks`, `autograd`,
`comm`, `settings`.
"""
