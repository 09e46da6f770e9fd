"""Checkpoints: what a training run is saved as, and resumed from.

`checkpoints` saves and loads, a file per rank (`shard_file`, `host_buffer`), `dcp_checkpoints` in PyTorch's distributed
format; `manifest` is what a checkpoint says of itself. `opening` and `run_lock` make a folder one run's alone,
`run_folder` says what lies there; ranks write together by `joint_write`, beside the training by `writer`. `of_job` is
what a job says of it. Imports `engine` and what is below it.
"""
