"""The runtime's clocks, one for each purpose.

now_s            how long something took, and until when to wait: never set back, the host's finest
time_of_day_s    what all ranks of a machine share, as traces do
..._computed_s    how long this thread, or process, has computed, whoever else had the core meanwhile
settled_s        how long a device took: `now_s` after everything that was asked of it is done
timing_event     (in `device`) the same without waiting, for steps that must not be held up
"""

from __future__ import annotations

import time

import torch

from ..watch.wall_time import now_s as now_s
from .device import synchronize

thread_computed_s = time.thread_time
"""Seconds that a core has worked for this thread."""

process_computed_s = time.process_time
"""Seconds that cores have worked for all threads of this process."""

time_of_day_s = time.time
"""Seconds since 1970, as the machine's clock has it."""


def settled_s(device: torch.device) -> float:
    """Wait until everything that was asked of a device is done, and return `now_s`."""
    synchronize(device)
    return now_s()
