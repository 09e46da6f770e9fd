"""Saving and loading: the state of a training, for any mesh, and weights for others.

`placement` says where a rank's part of a tensor lies, whatever the format; `rank_tensors` are what it has, and gather,
`saved_state` what was saved (`stored_tensors`), and `load_state` lets an engine go on from it. `write_tensors` makes
files; `dcp` is PyTorch's distributed format, `pretrained` transformers'.
Imports `state`, `optim`, `stage`, `models`, `parallel`, `blocks`, `comm`, `job`.
"""
