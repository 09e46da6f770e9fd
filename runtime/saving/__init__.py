"""Saving and loading: checkpoints of a training for any mesh, and weights for other programs.

`index_ranges_in_full_tensors` maps a rank's shard to its place in the full tensor, whatever the format;
`rank_tensor_inventory` lists and gathers what a rank holds, `saved_state` what was saved (`lazy_tensors`), and
`load_state` loads one into an engine. `write_tensors` writes files; `dcp` is PyTorch's distributed format, `pretrained`
that of transformers. Imports `weights_and_gradients`, `optim`, `stage`, `models`, `parallel`, `blocks`, `comm`,
`settings`.
"""
