"""Copies between device and host memory that overlap with computation, one at a time in each direction.

computation    F0 ──▶ F1 ──▶ F2 …
to the host       ├─ copy ─┤├─ copy ─┤
back                          ├─ copy ─┤

an accelerator   two side streams, to and from pinned memory; the device waits, not the host
the CPU          the host copies synchronously
a timed link     the same, but waits last until a link of a given speed would be done (`local`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import sleep
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import UsageError

from .clocks import now_s
from .device import current_stream, is_accelerator, new_stream, on_stream, timing_event

Moment = Any
"""A time of `now_s`; on an accelerator an event. A recorder takes either as a timestamp."""


class Copy:
    """A started copy; `begin` and `end` are its times."""

    def __init__(self, begin: Moment, end: Moment) -> None:
        self.begin, self.end = begin, end

    def wait(self) -> None:
        """Return when it is done; on an accelerator the current stream waits instead."""


class HostLink:
    """Link of a rank on the CPU, whose memory is the host's: copies are synchronous."""

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Copy]:
        """Start a copy of the current contents to the host; `tensors` must live until the copy is `released`."""
        begin = now_s()
        return [tensor.clone() for tensor in tensors], Copy(begin, now_s())

    def release(self, copy: Copy) -> None:
        """Allow reuse of the memory that a copy reads: work that is queued from here on runs after the copy."""

    def to_device(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Copy]:
        """Start a copy back, into newly allocated memory; it may be used after the copy's `wait`."""
        begin = now_s()
        return [tensor.clone() for tensor in tensors], Copy(begin, now_s())


def host_link(device: torch.device) -> HostLink:
    """Return the link for a device."""
    return _StreamLink(device) if is_accelerator(device) else HostLink()


class TimedLink(HostLink):
    """A simulated link of `bandwidth` bytes per second in each direction."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._to_host_free_s = self._to_device_free_s = self._room_s = -math.inf

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Copy]:
        """Start a copy as soon as the link is free."""
        copy = self._begin(tensors, self._to_host_free_s)
        self._to_host_free_s = copy.end
        return super().to_host(tensors)[0], copy

    def release(self, copy: Copy) -> None:
        """Order later copies to the device after this one."""
        self._room_s = max(self._room_s, copy.end)

    def to_device(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Copy]:
        """Start a copy as soon as the link, and the released memory, is free."""
        copy = self._begin(tensors, max(self._to_device_free_s, self._room_s))
        self._to_device_free_s = copy.end
        return super().to_device(tensors)[0], copy

    def _begin(self, tensors: Sequence[Tensor], free_s: float) -> Copy:
        begin = max(now_s(), free_s)
        return _TimedCopy(begin, begin + sum(tensor.nbytes for tensor in tensors) / self._bandwidth)


class _TimedCopy(Copy):
    def wait(self) -> None:
        sleep(max(self.end - now_s(), 0.0))


class _StreamLink(HostLink):
    """Link of an accelerator: copies run in streams of their own, to and from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away, self._back = new_stream(device), new_stream(device)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Copy]:
        sizes = [tensor.nbytes for tensor in tensors]
        host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True).split(sizes)
        return list(host), self._copy(self._away, host, tensors)

    def release(self, copy: Copy) -> None:
        """Make the current stream wait: memory that is freed now is reused in its order."""
        copy.wait()

    def to_device(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Copy]:
        fresh = [torch.empty_like(tensor, device=self._device, pin_memory=False) for tensor in tensors]
        return fresh, self._copy(self._back, fresh, tensors)

    def _copy(self, stream: torch.Stream | None, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Copy:
        """Copy on a stream, after all work queued on the current one."""
        assert stream is not None
        stream.wait_stream(current_stream(self._device))
        with on_stream(stream):
            begin = timing_event(self._device)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return _StreamCopy(self._device, begin, timing_event(self._device))


class _StreamCopy(Copy):
    def __init__(self, device: torch.device, begin: Moment, end: Moment) -> None:
        super().__init__(begin, end)
        self._device = device

    def wait(self) -> None:
        current_stream(self._device).wait_event(self.end)


def require_bandwidth(bandwidth: float | None) -> None:
    """Raise `UsageError` for an invalid link speed, in bytes per second."""
    if bandwidth is not None and not (bandwidth > 0 and math.isfinite(bandwidth)):
        raise UsageError(f"a link to the host cannot move {bandwidth!r} bytes a second; give more than 0")
