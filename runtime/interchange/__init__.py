"""Weights and training states as other libraries store them: transformers' folders, PyTorch's distributed checkpoints.

`held` knows what a rank has of each tensor, `boxes` where that lies in the full one, `names` what the tensor is called
elsewhere; `load_pretrained` and `save_pretrained` are for safetensors, `save_dcp` and `load_dcp` for PyTorch's format.
Imports `state`, `stage`, `models`, `parallel`, `blocks`, `comm`.
"""
