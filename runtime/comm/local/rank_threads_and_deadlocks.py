"""State shared by the rank threads of one run: messages, collectives (meetings), and waits, with deadlock detection.

As all waits happen under one lock, a deadlock is detected, not timed out: when every rank waits and nothing that is
waited for can come, all of them get a StallError that lists the waits. A message in flight will come, so a rank that
waits for one counts as busy. This assumes that a rank is one thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from time import sleep
from typing import NoReturn, Protocol, get_args

import torch

from quintsched.errors import MisfitError, StallError, UsageError, suggest

from ...settings.allowed_setting_values import Rules
from ..clocks import now_s
from ..host_copies import require_bandwidth
from ..random_generators import SEEDED, generators_lent
from .collectives_by_nccl_rules import Meetings
from .messages_by_nccl_rules import LocalChannels, WireTimes, require_wire_times

_NOTHING = nullcontext()


class Awaited(Protocol):
    """A message or a collective that a rank can wait for. Called with the world's lock held."""

    @property
    def arrival_s(self) -> float | None:
        """The time (`now_s`) of its arrival (0: arrived), or None as long as other ranks must act first."""

    def finish(self) -> None:
        """Deliver the result; called after the arrival, and allowed twice."""

    def describe_to(self, rank: int) -> str:
        """Describe what `rank` waits for, in words."""


class LocalWorld:
    """State shared by the rank threads of one run: messages, meetings, and waits.

    Args:
        world_size: number of ranks.
        device: the device of their tensors.
        timeout_s: maximum duration of one wait, in seconds.
        rules: semantics of messages: "mailbox", "rendezvous" or "nccl".
        wire_s: simulated duration of a message, in seconds: on all channels, or on each (source, destination).
        collective_s: simulated duration of a collective of several ranks, in seconds, after all have joined it.
        host_bandwidth: simulated speed of host copies of activations, in bytes per second; None: not simulated.

    Raises:
        UsageError: unknown rules, or an invalid time.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        *,
        rules: Rules = "mailbox",
        wire_s: WireTimes = 0.0,
        collective_s: float = 0.0,
        host_bandwidth: float | None = None,
    ) -> None:
        if rules not in get_args(Rules):
            raise UsageError(f"unknown rules {rules!r}{suggest(rules, get_args(Rules))}")
        require_wire_times(wire_s, world_size)
        if not (collective_s >= 0 and math.isfinite(collective_s)):
            raise UsageError(f"a collective cannot take {collective_s!r} s")
        require_bandwidth(host_bandwidth)
        self.world_size = world_size
        self.host_bandwidth = host_bandwidth
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.rules: Rules = rules
        self.failure: tuple[int, BaseException] | None = None
        self.lock = threading.Lock()
        self.wire = LocalChannels(rules, wire_s)
        self.meetings = Meetings(one_order=rules == "nccl", collective_s=collective_s)
        self._partitions: dict[int, tuple[int, list[tuple[int, ...]]]] = {}
        # a condition per rank, so that a message wakes one rank, not all
        self._bells = [threading.Condition(self.lock) for _ in range(world_size)]
        self._end = threading.Condition(self.lock)
        self._waits: dict[int, Awaited] = {}
        self._closed: set[int] = set()

    def abort(self, rank: int, error: BaseException) -> None:
        """Wake all ranks with a StallError that names `rank`; the first failure is kept."""
        with self.lock:
            self._fail(rank, error)

    def close(self, rank: int) -> None:
        """Record that `rank` will not send any more; wakes ranks that wait for it."""
        with self.lock:
            self._closed.add(rank)
            self._ring_all()

    def wait_for_end(self) -> None:
        """Return when all ranks have ended, or one failed."""
        with self.lock:
            self._end.wait_for(lambda: self.failure is not None or len(self._closed) == self.world_size)

    def agree(self, rank: int, call: int, partition: list[tuple[int, ...]]) -> None:
        """Check that the `call`-th partition is the same list on all ranks."""
        with self.lock:
            first, expected = self._partitions.setdefault(call, (rank, partition))
        if partition != expected:
            raise MisfitError(f"group {call}: rank {first} splits the world into {expected}, rank {rank} {partition}")

    def wake(self, rank: int) -> None:
        """Wake `rank` to check its wait again; the lock is held."""
        if rank in self._waits:
            self._bells[rank].notify()

    def wake_all(self, ranks: Iterable[int]) -> None:
        """Wake some ranks to check their waits again; the lock is held."""
        for rank in ranks:
            if rank in self._waits:
                self._bells[rank].notify()

    def wait_for(self, rank: int, awaited: Awaited) -> None:
        """Return when `awaited` has arrived and is finished.

        Raises:
            StallError: another rank failed, all ranks wait for each other, or the timeout has expired.
            MisfitError: the two ends do not match.
        """
        with generators_lent() if threading.get_ident() in SEEDED else _NOTHING, self.lock:
            if awaited.arrival_s is None:
                self._wait_until_under_way(rank, awaited)
            if awaited.arrival_s:
                self._sleep_until(awaited.arrival_s)
            awaited.finish()

    def _wait_until_under_way(self, rank: int, awaited: Awaited) -> None:
        deadline_s = now_s() + self.timeout_s
        self._waits[rank] = awaited
        try:
            while awaited.arrival_s is None:
                self._stop_if_hopeless(rank, awaited)
                left_s = deadline_s - now_s()
                if left_s <= 0:
                    self._stall(rank, f"rank {rank} waited {self.timeout_s:g} s for {awaited.describe_to(rank)}")
                self._bells[rank].wait(left_s)
        finally:
            del self._waits[rank]

    def _sleep_until(self, arrival_s: float) -> None:
        """Release the lock and sleep until the arrival, which is certain.

        A plain sleep is a tenth of a millisecond late. Polling the clock at its end would be more precise on an idle
        machine, and worse with more ranks than cores.
        """
        left_s = arrival_s - now_s()
        if left_s > 0:
            self.lock.release()
            try:
                sleep(left_s)
            finally:
                self.lock.acquire()

    def _stop_if_hopeless(self, rank: int, awaited: Awaited) -> None:
        if self.failure:
            culprit, error = self.failure
            reason = f"rank {culprit} failed first: {type(error).__name__}: {error}"
            raise StallError(f"rank {rank} stopped waiting for {awaited.describe_to(rank)}; {reason}") from error
        all_idle = len(self._waits) + len(self._closed - self._waits.keys()) == self.world_size
        if all_idle and all(other.arrival_s is None for other in self._waits.values()):
            waits = [f"\n  rank {r} waits for {other.describe_to(r)}" for r, other in sorted(self._waits.items())]
            ends = [f"\n  rank {r} has ended" for r in sorted(self._closed)]
            self._stall(rank, "deadlock: nothing that is waited for can come" + "".join(waits + ends))

    def _stall(self, rank: int, message: str) -> NoReturn:
        error = StallError(message)
        self._fail(rank, error)
        raise error

    def _fail(self, rank: int, error: BaseException) -> None:
        self.failure = self.failure or (rank, error)
        self._ring_all()

    def _ring_all(self) -> None:
        for bell in self._bells:
            bell.notify_all()
        self._end.notify_all()
