"""Operations on checkpoints in one process, without the model: show, verify, reshard, export, import.

Imports the rest of `saving` and what is below it; torch only where tensors are read.
"""
