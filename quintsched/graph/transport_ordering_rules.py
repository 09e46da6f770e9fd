"""Transport profiles: the queues into which a transport puts a rank's instructions; each queue runs in order.

    blocking        ▶ all instructions ▶
    single-stream   ▶ computation ▶     ▶ all messages and collectives ▶
    pair-stream     ▶ computation ▶     ▶ with rank 1 ▶   ▶ with rank 2 ▶   ▶ each group ▶
    channel         ▶ computation ▶     ▶ to 1 ▶  ▶ from 1 ▶  ▶ to 2 ▶  …   ▶ each group ▶
    tagged          ▶ computation ▶     messages are unordered               ▶ each group ▶

Copies to host memory and back have a queue each, in all profiles but the first. In the proof, collectives of
different groups wait for each other too, in a rank's launch order, except under `tagged`: see `edges`.

Each profile relaxes the previous one, so a plan that is free of deadlock under one is so under all that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quintsched.errors import UsageError, suggest
from quintsched.graph.events_and_channels import NO_GROUP, Channels, Events
from quintsched.ir.instruction_columns import Ints
from quintsched.ir.instruction_set import AMONG_REPLICAS, OWN_QUEUES

NO_QUEUE, COMPUTE_QUEUE, WIRE_QUEUE, REPLICAS_QUEUE, FIRST_OWN_QUEUE = range(-1, 4)
FIRST_GROUP_QUEUE = FIRST_OWN_QUEUE + len(OWN_QUEUES)


@dataclass(frozen=True)
class TransportProfile:
    """Serialization of a rank's instructions by a transport.

    `one_queue`: all in one queue. `one_wire`: all messages and collectives in one queue. Else collectives have a queue
    per group, and `message_queues` (None: unordered) returns the queue of each channel.
    """

    name: str
    stands_for: str
    one_queue: bool = False
    one_wire: bool = False
    message_queues: Callable[[Channels], Ints] | None = None

    @property
    def matches_by_tag(self) -> bool:
        """Whether messages match by tag, so that no queue orders them."""
        return not (self.one_queue or self.one_wire or self.message_queues)

    def queues(self, events: Events) -> Ints:
        """Return the queue of each row on its rank; `NO_QUEUE` if it is unordered."""
        columns, channels, groups = events.columns, events.channels, events.groups
        queues = np.full(len(columns), COMPUTE_QUEUE)
        if self.one_queue:
            return queues
        queues[columns.are(*AMONG_REPLICAS)] = WIRE_QUEUE if self.one_wire else REPLICAS_QUEUE
        for number, kinds in enumerate(OWN_QUEUES.values(), start=FIRST_OWN_QUEUE):
            queues[columns.rows_where(*kinds)] = number
        collective = groups != NO_GROUP
        queues[collective] = WIRE_QUEUE if self.one_wire else FIRST_GROUP_QUEUE + groups[collective]
        of_channels = self._of_channels(channels, FIRST_GROUP_QUEUE + int(groups.max(initial=0)) + 1)
        for ends in (channels.sends, channels.receives):
            queues[ends.rows] = of_channels[ends.channels]
        return queues

    def _of_channels(self, channels: Channels, first: int) -> Ints:
        if self.one_wire:
            return np.full(channels.num_channels, WIRE_QUEUE)
        if self.message_queues is None:
            return np.full(channels.num_channels, NO_QUEUE)
        return first + self.message_queues(channels)


def each_channel(channels: Channels) -> Ints:
    """Return the queue of each channel if every channel has its own."""
    return np.arange(channels.num_channels)


def each_pair(channels: Channels) -> Ints:
    """Return the queue of each channel if both directions of a pair of ranks share one."""
    pairs = np.sort(np.stack([channels.sources, channels.destinations]), axis=0)
    return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)


PROFILES: dict[str, TransportProfile] = {
    profile.name: profile
    for profile in (
        TransportProfile("blocking", "host-blocking calls; gloo's send at any size", one_queue=True),
        TransportProfile("single-stream", "one NCCL communicator and stream", one_wire=True),
        TransportProfile("pair-stream", "NCCL pair communicators made up front", message_queues=each_pair),
        TransportProfile("channel", "one queue per directed channel", message_queues=each_channel),
        TransportProfile("tagged", "gloo with tags"),
    )
}
"""Profiles by name, strictest first: the edges of each include those of all that follow."""


def find_profile(name: str) -> TransportProfile:
    """Return the transport profile of this name; raises `UsageError`."""
    if name not in PROFILES:
        raise UsageError(f"unknown transport profile {name!r}{suggest(name, PROFILES)}")
    return PROFILES[name]
