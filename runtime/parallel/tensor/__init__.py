"""Tensor and sequence parallelism: choice of layers to cut, sharded layers, vocabulary-parallel loss.

`apply` cuts a module and `model_cuts` a model, by `rules`, into the layers of `column_row_layers`; `shard` records how
each parameter was cut. Imports `expert`, `blocks`, `autograd`, `comm`, `job`.
"""
