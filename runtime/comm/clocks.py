"""The runtime's clocks, one for each purpose.

now_s            durations and deadlines: monotonic, the host's finest clock
time_of_day_s    the clock that all ranks of a machine share, for traces
..._computed_s    CPU time of this thread, or process, without time that others had the core
settled_s        duration of device work: `now_s` after all work queued on it is done
timing_event     (in `device`) the same without waiting, for steps that must not be delayed
"""

from __future__ import annotations

import time

import torch

from ..watch.torch_free_clock import now_s as now_s
from .device import synchronize

thread_computed_s = time.thread_time
"""CPU seconds of this thread."""

time_of_day_s = time.time
"""Seconds since 1970, by the machine's clock."""


def settled_s(device: torch.device) -> float:
    """Wait until all work queued on a device is done, and return `now_s`."""
    synchronize(device)
    return now_s()
