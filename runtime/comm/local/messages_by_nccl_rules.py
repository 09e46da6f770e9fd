"""Messages between the threads of one process, by the rules of NCCL or laxer ones: matching, start, and arrival.

    send 0 ──▶ message 0 ◀── receive 0        per (source, destination, tag); under NCCL's rules per
    send 1 ──▶ message 1 ◀── receive 1        (source, destination): matched by order alone

    channel 0 to 1   ├── message 0 ──┤├── message 1 ──┤      one at a time, each `wire_s` of that channel long
                     ▲ sent, and unless buffered, received

Under the rules "mailbox" a message starts when it is sent, otherwise when both ends are posted. Under "nccl" nothing is
copied until one of the two waits after its arrival: a tensor that is modified too early arrives modified.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quintsched.errors import MisfitError, UsageError

from ...settings.allowed_setting_values import Rules
from ..checked.message_frame import NO_LABEL, Label
from ..clocks import now_s
from ..transport_interface import describe

ChannelKey = tuple[int, int, int | None]
What = tuple[Label, int]
"""Label of a message, and its step."""

NOTHING_SAID: What = (NO_LABEL, 0)
WireTimes = float | Mapping[tuple[int, int], float]
"""Seconds per message: on all channels, or on each (source, destination), 0 where a channel is not named."""


def require_wire_times(wire_s: WireTimes, world_size: int) -> None:
    """Raise `UsageError` for times that are none, and for channels of other ranks."""
    times = wire_s if isinstance(wire_s, Mapping) else {(0, 0): wire_s}
    for channel, seconds in times.items():
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise UsageError(f"a message cannot be under way for {seconds!r} s")
        if not all(0 <= end < world_size for end in channel):
            raise UsageError(f"wire_s names the channel {channel}, but ranks are 0 to {world_size - 1}")


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
