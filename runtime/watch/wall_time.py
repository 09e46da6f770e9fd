"""The time, for what runs without torch; `comm.clock` has the rest."""

from __future__ import annotations

import time

now_s = time.perf_counter
"""Seconds since some moment, the same for all threads of a process."""
