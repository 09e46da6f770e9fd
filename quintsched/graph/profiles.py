"""Transport profiles: which of a rank's instructions share a queue on a transport, and so run one after the other.

    blocking        ▶ everything ▶
    single-stream   ▶ computation ▶     ▶ all messages and collectives ▶
    pair-stream     ▶ computation ▶     ▶ with rank 1 ▶   ▶ with rank 2 ▶   ▶ each group ▶
    channel         ▶ computation ▶     ▶ to 1 ▶  ▶ from 1 ▶  ▶ to 2 ▶  …   ▶ each group ▶
    tagged          ▶ computation ▶     messages are in no order             ▶ each group ▶

Copies to the host's memory and back have a queue each, under all but the first. The proof has collectives of different
groups wait for each other too, in the order in which a rank launches them, except under `tagged`: see `edges`.

Each relaxes the one before it, so a plan that is free of deadlock under one is free under all that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quintsched.errors import UsageError, suggest
from quintsched.graph.plan_events import NO_GROUP, Channels, Events
from quintsched.ir.columns import Ints
from quintsched.ir.instructions import AMONG_REPLICAS, OWN_QUEUES

NO_QUEUE, COMPUTE_QUEUE, WIRE_QUEUE, REPLICAS_QUEUE, FIRST_OWN_QUEUE = range(-1, 4)
FIRST_GROUP_QUEUE = FIRST_OWN_QUEUE + len(OWN_QUEUES)


@dataclass(frozen=True)
class Profile:
    """How a transport serialises what a rank does.

    `one_queue`: everything in one. `one_wire`: all messages and collectives in one. Else collectives have a queue
    per group, and `message_queues` (None: no order) numbers the queue of each channel.
    """

    name: str
    stands_for: str
    one_queue: bool = False
    one_wire: bool = False
    message_queues: Callable[[Channels], Ints] | None = None

    @property
    def matches_by_tag(self) -> bool:
        """Whether messages find each other by name, so that no queue orders them."""
        return not (self.one_queue or self.one_wire or self.message_queues)

    def queues(self, events: Events) -> Ints:
        """Return the number of each row's queue on its rank; `NO_QUEUE` where nothing orders it."""
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


def _each_channel(channels: Channels) -> Ints:
    return np.arange(channels.num_channels)


def _each_pair(channels: Channels) -> Ints:
    pairs = np.sort(np.stack([channels.sources, channels.destinations]), axis=0)
    return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("blocking", "host-blocking calls; gloo's send at any size", one_queue=True),
        Profile("single-stream", "one NCCL communicator and stream", one_wire=True),
        Profile("pair-stream", "NCCL pair communicators made up front", message_queues=_each_pair),
        Profile("channel", "one queue per directed channel", message_queues=_each_channel),
        Profile("tagged", "gloo with tags"),
    )
}
"""Strictest first: each profile's waits include those of all that follow it."""


def find_profile(name: str) -> Profile:
    """Return the transport profile of this name; raises `UsageError`."""
    if name not in PROFILES:
        raise UsageError(f"unknown transport profile {name!r}{suggest(name, PROFILES)}")
    return PROFILES[name]
