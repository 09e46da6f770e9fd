"""Tensor and sequence parallelism: which layers are cut and how, the cut layers, the loss on a cut vocabulary.

`apply` cuts a module and `model_cuts` a model, by `rules`; `column_row_layers` are what it becomes, and `shard` is how
each parameter was cut. Imports `expert`, `blocks`, `autograd`, `comm`, `job`.
"""
