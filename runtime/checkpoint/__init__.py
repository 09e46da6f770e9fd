"""Checkpoints: what a training run is saved as, and resumed from.

`checkpoints` saves and loads, a file per rank; `manifest` is what a checkpoint says of itself, and how it is read.
Imports `engine` and what is below it.
"""
