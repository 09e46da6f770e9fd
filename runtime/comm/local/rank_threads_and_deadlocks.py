"""State shared by the rank threads of one run: messages, collectives (meetings), and waits, with deadlock detection.

As all waits happen under one lock, a deadlock is detected, not timed out: when every rank waits and nothing that is
waited for can come, all of them get a StallError that lists the waits. A message in flight will come, so a rank that
waits for one counts as busy. This assumes that a rank is one thread.

Messages between the threads of one process: their matching, their start, and their arrival.

    send 0 ──▶ message 0 ◀── receive 0        per (source, destination, tag); under NCCL's rules per
    send 1 ──▶ message 1 ◀── receive 1        (source, destination): matched by order alone

    channel 0 to 1   ├── message 0 ──┤├── message 1 ──┤      one at a time, each `wire_s` of that channel long
                     ▲ sent, and unless buffered, received

Under the rules "mailbox" a message starts when it is sent, otherwise when both ends are posted. Under "nccl" nothing is
copied until one of the two waits after its arrival: a tensor that is modified too early arrives modified.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import sleep
from typing import NoReturn, Protocol, get_args

import torch
from torch import Tensor

from quintsched.errors import MisfitError, StallError, UsageError, suggest

from ...settings.engine_settings import Rules
from ..checked.message_frame import NO_LABEL, Label
from ..clocks import now_s
from ..host_copies import require_bandwidth
from ..random_generators import SEEDED, generators_lent
from ..transport_interface import describe
from .thread_collectives import Meetings

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
        _check_wires(wire_s, world_size)
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


def _check_wires(wire_s: WireTimes, world_size: int) -> None:
    times = wire_s if isinstance(wire_s, Mapping) else {(0, 0): wire_s}
    for channel, seconds in times.items():
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise UsageError(f"a message cannot be under way for {seconds!r} s")
        if not all(0 <= end < world_size for end in channel):
            raise UsageError(f"wire_s names the channel {channel}, but ranks are 0 to {world_size - 1}")


ChannelKey = tuple[int, int, int | None]
What = tuple[Label, int]
"""Label of a message, and its step."""

NOTHING_SAID: What = (NO_LABEL, 0)
WireTimes = float | Mapping[tuple[int, int], float]
"""Seconds per message: on all channels, or on each (source, destination), 0 where a channel is not named."""


@dataclass(slots=True)
class LocalMessage:
    """The `number`-th message of its key; `arrival_s` is None until it starts."""

    key: ChannelKey
    number: int
    payload: Tensor | None = None
    buffer: Tensor | None = None
    sent: What = NOTHING_SAID
    wanted: What = NOTHING_SAID
    arrival_s: float | None = None

    def finish(self) -> None:
        """Copy the payload into the buffer, unless the other end has done so.

        Raises:
            MisfitError: the two ends do not match.
        """
        payload, buffer = self.payload, self.buffer
        if payload is None or buffer is None:
            return
        fits = payload.shape == buffer.shape and payload.dtype == buffer.dtype
        if not fits or self.sent[1] != self.wanted[1] or self.sent[0].same != self.wanted[0].same:
            expected = f"rank {self.key[1]} expected {self.describe_to(self.key[1])}{_words(self.wanted)}"
            raise MisfitError(f"{expected}, but it is {describe(payload)}{_words(self.sent)}")
        buffer.copy_(payload)
        self.payload = self.buffer = None

    def describe_to(self, rank: int) -> str:
        """Describe the message, as seen from one of its ends."""
        source, destination, tag = self.key
        name = f"message {self.number}"
        tagged = "" if tag is None else f" with tag {tag}"
        if rank == source and self.payload is not None:
            return f"rank {destination} to receive {name}{tagged}, {describe(self.payload)}"
        wanted = "" if self.buffer is None else f", {describe(self.buffer)}"
        return f"{name} from rank {source}{tagged}{wanted}"


def _words(what: What) -> str:
    label, step = what
    if label is NO_LABEL:
        return ""
    return f", {label}, of step {step}" + (f" (instruction {label.instruction})" if label.instruction >= 0 else "")


@dataclass(slots=True)
class _Mailbox:
    """Counters of the two ends of a key, and its messages with one end missing."""

    num_sent: int = 0
    num_received: int = 0
    open: dict[int, LocalMessage] = field(default_factory=dict)

    def message_of(self, key: ChannelKey, number: int) -> LocalMessage:
        """Return the message of this number: that which the other end has posted, or a new one."""
        message = self.open.pop(number, None)
        if message is None:
            message = self.open[number] = LocalMessage(key, number)
        return message


class LocalChannels:
    """All directed channels of a world. Calls are made with the world's lock held."""

    def __init__(self, rules: Rules, wire_s: WireTimes) -> None:
        self.is_buffered = rules == "mailbox"
        self.is_tagged = rules != "nccl"
        self._wire_s = wire_s
        self._boxes: defaultdict[ChannelKey, _Mailbox] = defaultdict(_Mailbox)
        self._free_s: dict[tuple[int, int], float] = {}

    @property
    def num_open(self) -> int:
        """Number of messages with one end missing."""
        return sum(len(box.open) for box in self._boxes.values())

    def send(self, source: int, destination: int, tag: int, payload: Tensor, what: What = NOTHING_SAID) -> LocalMessage:
        """Post the next send; under the rules "nccl" the payload's memory is read when the message is delivered."""
        key = (source, destination, tag if self.is_tagged else None)
        box = self._boxes[key]
        message, box.num_sent = box.message_of(key, box.num_sent), box.num_sent + 1
        message.payload, message.sent = payload, what
        if self.is_buffered or message.buffer is not None:
            self._start(message)
        return message

    def receive(
        self, source: int, destination: int, tag: int, buffer: Tensor, what: What = NOTHING_SAID
    ) -> LocalMessage:
        """Post the next receive."""
        key = (source, destination, tag if self.is_tagged else None)
        box = self._boxes[key]
        message, box.num_received = box.message_of(key, box.num_received), box.num_received + 1
        message.buffer, message.wanted = buffer, what
        if message.payload is not None and message.arrival_s is None:
            self._start(message)
        return message

    def _start(self, message: LocalMessage) -> None:
        """Start the message on its channel, which carries one at a time."""
        channel = message.key[:2]
        wire_s = self._wire_s.get(channel, 0.0) if isinstance(self._wire_s, Mapping) else self._wire_s
        if not wire_s:
            message.arrival_s = 0.0
            return
        start_s = max(now_s(), self._free_s.get(channel, 0.0))
        message.arrival_s = self._free_s[channel] = start_s + wire_s
