"""What is done to checkpoints in one process, without the model: shown, verified, resharded, exported, imported.

Imports the rest of `saving` and what is below it; torch only where tensors are read.
"""
