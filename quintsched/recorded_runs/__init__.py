"""Recorded runs of pipelines, with their plans: read from traces of this project, of Primus and of torch.profiler.

`read_run` reads any of these; `primus_trace` and `torch_profiler_trace` rebuild the plan that a foreign trace does not
name; `recorded_run` is what all have in common. Imports `compiler`, `torch_csv`, `plan`, `trace`, `formats`,
`schedules`, `ir`, `files` and `errors`.
"""

from quintsched.recorded_runs.read_run import load_run
from quintsched.recorded_runs.recorded_run import RecordedRun, RecordedStep

__all__ = ["RecordedRun", "RecordedStep", "load_run"]
