"""Messages between the threads of one process: who meets whom, when a message starts, when it is there.

    send 0 ──▶ message 0 ◀── receive 0        of one (source, destination, tag); under NCCL's rules of one
    send 1 ──▶ message 1 ◀── receive 1        (source, destination): the order is all there is

    channel 0 to 1   ├── message 0 ──┤├── message 1 ──┤      one at a time, each `wire_s` of that channel long
                     ▲ sent, and unless buffered, received

Under the rules "mailbox" a message starts when it is sent, else when both ends are there. Under "nccl" nothing is
copied until one of the two waits after its arrival: a tensor that is changed too early arrives changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quintsched.errors import MisfitError

from ...settings.run_settings import Rules
from ..base import describe
from ..checked.frame import NO_LABEL, Label
from ..clock import now_s

Key = tuple[int, int, int | None]
What = tuple[Label, int]
"""What a message is for, and in which step."""

NOTHING_SAID: What = (NO_LABEL, 0)
WireTimes = float | Mapping[tuple[int, int], float]
"""Seconds that a message is under way: on all channels, or on each (source, destination), 0 where none is named."""


@dataclass(slots=True)
class Message:
    """The `number`-th message of its key; `arrival_s` is None until it starts."""

    key: Key
    number: int
    payload: Tensor | None = None
    buffer: Tensor | None = None
    sent: What = NOTHING_SAID
    wanted: What = NOTHING_SAID
    arrival_s: float | None = None

    def finish(self) -> None:
        """Move what was sent into the buffer, unless the other end did so.

        Raises:
            MisfitError: the two ends do not fit each other.
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
        """Say which message this is, as seen from one of its ends."""
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
    """How far the two ends of a key are, and its messages of which one end is missing."""

    num_sent: int = 0
    num_received: int = 0
    open: dict[int, Message] = field(default_factory=dict)


class Wire:
    """All directed channels of a world. Calls are made with the world's lock held."""

    def __init__(self, rules: Rules, wire_s: WireTimes) -> None:
        self.is_buffered = rules == "mailbox"
        self.is_tagged = rules != "nccl"
        self._wire_s = wire_s
        self._boxes: defaultdict[Key, _Mailbox] = defaultdict(_Mailbox)
        self._free_s: dict[tuple[int, int], float] = {}

    @property
    def num_open(self) -> int:
        """How many messages there are of which one end is missing."""
        return sum(len(box.open) for box in self._boxes.values())

    def send(self, source: int, destination: int, tag: int, payload: Tensor, what: What = NOTHING_SAID) -> Message:
        """Post the next send; under the rules "nccl" the memory of `payload` is read when the message moves."""
        key = (source, destination, tag if self.is_tagged else None)
        box = self._boxes[key]
        number, box.num_sent = box.num_sent, box.num_sent + 1
        message = box.open.pop(number, None)
        if message is None:
            message = box.open[number] = Message(key, number)
        message.payload, message.sent = payload, what
        if self.is_buffered or message.buffer is not None:
            self._start(message)
        return message

    def receive(self, source: int, destination: int, tag: int, buffer: Tensor, what: What = NOTHING_SAID) -> Message:
        """Post the next receive."""
        key = (source, destination, tag if self.is_tagged else None)
        box = self._boxes[key]
        number, box.num_received = box.num_received, box.num_received + 1
        message = box.open.pop(number, None)
        if message is None:
            message = box.open[number] = Message(key, number)
        message.buffer, message.wanted = buffer, what
        if message.payload is not None and message.arrival_s is None:
            self._start(message)
        return message

    def _start(self, message: Message) -> None:
        """Put the message on its channel, which carries one at a time."""
        channel = message.key[:2]
        wire_s = self._wire_s.get(channel, 0.0) if isinstance(self._wire_s, Mapping) else self._wire_s
        if not wire_s:
            message.arrival_s = 0.0
            return
        start_s = max(now_s(), self._free_s.get(channel, 0.0))
        message.arrival_s = self._free_s[channel] = start_s + wire_s
