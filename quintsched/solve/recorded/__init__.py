"""Recorded runs: how much of their bubbles was avoidable.

`replay` times a recorded step again from its parts; `idle_causes` names the causes; `whatif` is the entry point.
`retune_cut_and_order` finds a better cut and order for a run. Imports `solve`, `recorded_runs`, `text` and packages
below.
"""

from quintsched.recorded_runs import RecordedRun, RecordedStep, load_run
from quintsched.solve.recorded.whatif import WhatIf, what_if

__all__ = ["RecordedRun", "RecordedStep", "WhatIf", "load_run", "what_if"]
