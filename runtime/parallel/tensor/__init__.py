"""Tensor and sequence parallelism: which layers are cut how, the layers that are cut, the loss on a cut vocabulary."""
