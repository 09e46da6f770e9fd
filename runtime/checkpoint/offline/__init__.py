"""What is done to checkpoints in one process, without the model: shown, verified, resharded, exported, imported.

Imports `checkpoint`, `saving` and what is below them; torch only where tensors are read.
"""
