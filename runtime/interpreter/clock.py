"""Clocks of one rank: one adds up the time it computes, the others note moments for a trace.

On a CPU a moment is the host's time. On a GPU, where the host runs ahead, it is an event on the current stream, which
has a time only when the work before it is done.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

import torch

Stamp = Any
"""A moment as a clock notes it: only the clock that gave it can read it."""


class Clock:
    """Adds up the time a rank computes, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] | None = (
            deque() if device.type == "cuda" else None
        )
        self._seconds = 0.0
        self._since = 0.0
        self._began: torch.cuda.Event | None = None

    def start(self) -> None:
        """Begin a stretch of computation."""
        if self._events is None:
            self._since = time.perf_counter()
        else:
            self._began = _event_now()

    def stop(self) -> None:
        """End the stretch that `start` began."""
        if self._events is None:
            self._seconds += time.perf_counter() - self._since
        elif self._began is not None:
            self._events.append((self._began, _event_now()))
            while self._events and self._events[0][1].query():
                self._add_oldest(self._events)

    def read_s(self) -> float:
        """Return the seconds since the last reading; on a GPU this waits for the work to end."""
        if self._events:
            self._events[-1][1].synchronize()
            while self._events:
                self._add_oldest(self._events)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_oldest(self, events: deque[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        begin, end = events.popleft()
        self._seconds += begin.elapsed_time(end) / 1000


class TraceClock(Protocol):
    """Notes moments cheaply, and says later when they were."""

    def set(self) -> None:
        """Set it to the time of day, before the first moment that it notes."""

    def now(self) -> Stamp:
        """Note this moment."""

    def wall_s(self, stamp: Stamp) -> float:
        """Return the time of day of a moment, in seconds: the clock that all ranks share."""


class HostClock:
    """The host's clock."""

    def __init__(self) -> None:
        self.now = time.perf_counter
        self._offset_s = 0.0

    def set(self) -> None:
        """Set it to the time of day."""
        self._offset_s = time.time() - time.perf_counter()

    def wall_s(self, stamp: float) -> float:
        """Return the time of day of a moment."""
        return stamp + self._offset_s


class EventClock:
    """The clock of a GPU: events on the current stream, against one whose time of day is known."""

    def __init__(self) -> None:
        self._base: torch.cuda.Event | None = None
        self._base_s = 0.0

    def set(self) -> None:
        """Set it to the time of day; waits for the GPU, once."""
        self._base = self.now()
        self._base.synchronize()
        self._base_s = time.time()

    def now(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return _event_now()

    def wall_s(self, stamp: torch.cuda.Event) -> float:
        """Return the time of day of a moment; waits until it has come."""
        if self._base is None:
            raise RuntimeError("the clock was never set to the time of day")
        stamp.synchronize()
        return float(self._base_s + self._base.elapsed_time(stamp) / 1000)


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
