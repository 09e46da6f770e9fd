"""Clocks of one rank: `Clock` adds up its compute time, the trace clocks record timestamps.

On a CPU a timestamp is the host's time. On a GPU, where the host runs ahead, it is an event on the current stream;
its time is known only when the work before it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ..comm.clocks import now_s, time_of_day_s
from ..comm.device import is_accelerator, timing_event

MOST_MOMENTS = 4096
"""Number of timestamps on a host that are kept before they are added up."""

ClockStamp = Any
"""A timestamp as a clock records it: only the clock that made it can read it."""


class Clock:
    """Adds up the time a rank computes, in seconds: a handler notes a timestamp before and after its computation.

        note, now = clock.note, clock.now
        note(now()); …; note(now())

    Attributes:
        now: returns a timestamp.
        note: records one, before and after each stretch of computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_on_host, self._is_off = device, not is_accelerator(device), False
        self._moments: list[Any] = []
        self._events: deque[tuple[torch.Event, torch.Event]] = deque()
        self._seconds = 0.0
        self.note: Callable[[Any], object] = self._moments.append
        self.now: Callable[[], Any] = now_s if self._is_on_host else self._event

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context in which no time counts, and no event is recorded or queried: a capture allows neither."""
        noted, self._is_off = len(self._moments), True
        try:
            yield
        finally:
            self._is_off = False
            del self._moments[noted:]

    def begin_step(self) -> None:
        """Add up the stretches noted so far, where they are many, one ended in an error, or they are events."""
        if len(self._moments) & 1 or len(self._moments) > MOST_MOMENTS or not self._is_on_host:
            self.add_up()

    def add_up(self) -> None:
        """Add up the noted stretches; one that ended in an error has only a beginning, which is dropped."""
        if self._is_off:
            return
        moments = self._moments
        if self._is_on_host:
            self._seconds += sum(moments[1::2]) - sum(moments[: len(moments) // 2 * 2 : 2])
        else:
            self._events.extend(zip(moments[::2], moments[1::2], strict=False))
            while self._events and self._events[0][1].query():
                self._add_oldest()
        moments.clear()

    def read_s(self) -> float:
        """Return the seconds since the last reading; on a GPU this waits for the work to end."""
        self.add_up()
        while self._events:
            self._events[0][1].synchronize()
            self._add_oldest()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _event(self) -> torch.Event | None:
        return None if self._is_off else timing_event(self._device)

    def _add_oldest(self) -> None:
        begin, end = self._events.popleft()
        self._seconds += begin.elapsed_time(end) / 1000


class NoClock(Clock):
    """Clock that adds up nothing: for the sides of an `Overlap`, which takes the time of both together."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.note = deque[Any](maxlen=0).append


class TraceClock(Protocol):
    """Records timestamps cheaply, and converts them to time of day later."""

    def set(self) -> None:
        """Set it to the time of day, before the first timestamp."""

    def now(self) -> ClockStamp:
        """Return a timestamp of this moment."""

    def wall_s(self, stamp: ClockStamp) -> float:
        """Return the time of day of a timestamp, in seconds: the clock that all ranks share."""


class HostClock:
    """The host's monotonic clock, with an offset to the time of day."""

    def __init__(self) -> None:
        self.now = now_s
        self._offset_s = 0.0

    def set(self) -> None:
        """Set it to the time of day."""
        self._offset_s = time_of_day_s() - now_s()

    def wall_s(self, stamp: float) -> float:
        """Return the time of day of a timestamp, in seconds."""
        return stamp + self._offset_s


class EventClock:
    """The clock of a GPU: events on the current stream, relative to a base event whose time of day is known."""

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
        """Return the time of day of a timestamp, in seconds; waits until the event has completed."""
        if self._base is None:
            raise RuntimeError("the clock was never set to the time of day")
        stamp.synchronize()
        return float(self._base_s + self._base.elapsed_time(stamp) / 1000)
