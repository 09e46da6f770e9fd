"""Clocks of one rank: one adds up the time it computes, the others note moments for a trace.

On a CPU a moment is the host's time. On a GPU, where the host runs ahead, it is an event on the current stream, which
has a time only when the work before it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ..comm.clock import now_s, time_of_day_s
from ..comm.device import is_accelerator, timing_event

Stamp = Any
"""A moment as a clock notes it: only the clock that gave it can read it."""


class Clock:
    """Adds up the time a rank computes, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[tuple[torch.Event, torch.Event]] | None = deque() if is_accelerator(device) else None
        self._seconds = 0.0
        self._since = 0.0
        self._began: torch.Event | None = None
        self._is_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which nothing counts, and no event is made."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def start(self) -> None:
        """Begin a stretch of computation."""
        if self._is_off:
            return
        if self._events is None:
            self._since = now_s()
        else:
            self._began = timing_event(self._device)

    def stop(self) -> None:
        """End the stretch that `start` began."""
        if self._is_off:
            return
        if self._events is None:
            self._seconds += now_s() - self._since
        elif self._began is not None:
            self._events.append((self._began, timing_event(self._device)))
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

    def _add_oldest(self, events: deque[tuple[torch.Event, torch.Event]]) -> None:
        begin, end = events.popleft()
        self._seconds += begin.elapsed_time(end) / 1000


class NoClock(Clock):
    """Adds up nothing: somebody else's clock runs."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def start(self) -> None:
        """Leave it to the other clock."""

    def stop(self) -> None:
        """Leave it to the other clock."""


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
        self.now = now_s
        self._offset_s = 0.0

    def set(self) -> None:
        """Set it to the time of day."""
        self._offset_s = time_of_day_s() - now_s()

    def wall_s(self, stamp: float) -> float:
        """Return the time of day of a moment."""
        return stamp + self._offset_s


class EventClock:
    """The clock of a GPU: events on the current stream, against one whose time of day is known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: torch.Event | None = None
        self._base_s = 0.0

    def set(self) -> None:
        """Set it to the time of day; waits for the GPU, once."""
        self._base = self.now()
        self._base.synchronize()
        self._base_s = time_of_day_s()

    def now(self) -> torch.Event:
        """Record an event on the current stream."""
        return timing_event(self._device)

    def wall_s(self, stamp: torch.Event) -> float:
        """Return the time of day of a moment; waits until it has come."""
        if self._base is None:
            raise RuntimeError("the clock was never set to the time of day")
        stamp.synchronize()
        return float(self._base_s + self._base.elapsed_time(stamp) / 1000)
