"""Checkpoints of a job: a folder that is one run's alone, steps that are there whole or not at all.

`checkpoints` saves and loads; `manifest` is what a checkpoint says of itself; ranks write beside the training by
`background`; `opening` makes a folder one run's, `run_folder` says what lies there.
Imports the rest of `saving`, and what is below it.
"""
