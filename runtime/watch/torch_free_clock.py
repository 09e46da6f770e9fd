"""Clock for modules without torch; `comm.clocks` has the others."""

from __future__ import annotations

import time

now_s = time.perf_counter
"""Seconds on a monotonic clock, the same for all threads of a process."""

epoch_s = time.time
"""Seconds since 1970, for other programs."""
