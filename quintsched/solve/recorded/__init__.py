"""Recorded runs: how much of their bubbles was avoidable.

`read_run` reads traces of this project, of Primus and of torch.profiler as a `recorded_run`; `replay` times it again
from its parts; `idle_causes` names the causes; `whatif` is the entry point.
`retune_cut_and_order` finds a better cut and order for a run. Imports `solve`, `trace`, `torch_csv`, `text` and
packages below.
"""

from quintsched.solve.recorded.read_run import load_run
from quintsched.solve.recorded.recorded_run import RecordedRun, RecordedStep
from quintsched.solve.recorded.whatif import WhatIf, what_if

__all__ = ["RecordedRun", "RecordedStep", "WhatIf", "load_run", "what_if"]
