"""The event graph: a plan's instructions as events, and what each event has to wait for.

    rank 0   Fwd ──▶ SendAct ┐                 a send and its receive are ONE event,
                             ├─ one event      a collective and its peers are ONE event;
    rank 1           RecvAct ┘ ──▶ Fwd         order within a queue and data flow are the edges

Which instructions share a queue depends on the transport profile. Under `blocking` everything on a rank is in
one queue; the others relax that step by step, so a plan that is free of deadlock under one profile is free under
all that follow it. With no wildcard receive and no branch, a plan is free of deadlock exactly if the graph has no
cycle. The simulator times the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quintsched.errors import UsageError, suggest
from quintsched.ir.columns import Columns, Ints
from quintsched.ir.dataflow import Flows, Uses
from quintsched.ir.instructions import (
    AMONG_REPLICAS,
    WHOLE_MESH,
    FreeParams,
    GatherParams,
    Recv,
    Send,
    ShareMetrics,
    SyncTied,
)
from quintsched.ir.values import TRAVELS

if TYPE_CHECKING:
    from quintsched.plan import Plan

NO_QUEUE, COMPUTE_QUEUE, WIRE_QUEUE, REPLICAS_QUEUE, FIRST_GROUP_QUEUE = range(-1, 4)
NO_GROUP = -1

ISSUED = (Send, Recv, ShareMetrics, SyncTied)
"""What a host only issues: it waits in computations, and at everything else that ends a step."""

MessageQueues = Callable[[Ints, Ints, int], Ints]
"""(sources, destinations, number of ranks) → a number per message, equal where messages share a queue."""


@dataclass(frozen=True)
class Profile:
    """How a transport serialises what a rank does.

    `one_queue`: everything in one. `one_wire`: all messages and collectives in one. Else collectives have a queue
    per group, and `message_queues` (None: no order) says which messages share one.
    """

    name: str
    stands_for: str
    one_queue: bool = False
    one_wire: bool = False
    message_queues: MessageQueues | None = None

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
        collective = groups != NO_GROUP
        queues[collective] = WIRE_QUEUE if self.one_wire else FIRST_GROUP_QUEUE + groups[collective]
        queues[channels.rows] = self._message_queues(channels, FIRST_GROUP_QUEUE + int(groups.max(initial=0)) + 1)
        return queues

    def _message_queues(self, channels: Channels, first: int) -> Ints | int:
        if self.one_wire:
            return WIRE_QUEUE
        if self.message_queues is None:
            return NO_QUEUE
        return first + self.message_queues(channels.sources, channels.destinations, channels.num_ranks)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("blocking", "host-blocking calls; gloo's send at any size", one_queue=True),
        Profile("single-stream", "one NCCL communicator and stream", one_wire=True),
        Profile(
            "pair-stream",
            "NCCL pair communicators made up front",
            message_queues=lambda s, d, n: np.minimum(s, d) * n + np.maximum(s, d),
        ),
        Profile("channel", "one queue per directed channel", message_queues=lambda s, d, n: s * n + d),
        Profile("tagged", "gloo with tags"),
    )
}
"""Strictest first: each profile's waits include those of all that follow it."""


def find_profile(name: str) -> Profile:
    """Return the transport profile of this name; raises `UsageError`."""
    if name not in PROFILES:
        raise UsageError(f"unknown transport profile {name!r}{suggest(name, PROFILES)}")
    return PROFILES[name]


@dataclass(frozen=True)
class Channels:
    """The messages of a plan. `numbers[i]` counts the sends, and likewise the receives, of a channel from 0."""

    num_ranks: int
    rows: Ints
    sources: Ints
    destinations: Ints
    numbers: Ints
    sends: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, columns: Columns) -> Channels:
        """Find source, destination and number of every message."""
        num_ranks = len(columns.first) - 1
        rows = np.flatnonzero(columns.are(Send, Recv))
        sends = columns.are(Send)[rows]
        rank, peer = columns.rank[rows], columns.peer[rows]
        sources, destinations = np.where(sends, rank, peer), np.where(sends, peer, rank)
        numbers = _count_within((sources * num_ranks + destinations) * 2 + sends)
        return cls(num_ranks, rows, sources, destinations, numbers, sends)

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """The rows of the k-th send and of the k-th receive of a channel, for all k that have both."""
        identity = (self.sources * self.num_ranks + self.destinations) * (len(self.rows) + 1) + self.numbers
        _, sent, received = np.intersect1d(
            identity[self.sends], identity[~self.sends], assume_unique=True, return_indices=True
        )
        return self.rows[self.sends][sent], self.rows[~self.sends][received]


def _count_within(groups: Ints) -> Ints:
    """Return, for each entry, how many entries of the same group stand before it."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(groups[order]) != 0]) if len(groups) else np.zeros(0, np.int64)
    counts = np.arange(len(groups)) - np.repeat(starts, np.diff(np.r_[starts, len(groups)]))
    numbers = np.empty_like(groups)
    numbers[order] = counts
    return numbers


def pipeline_collectives(plan: Plan) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """Return per group of pipeline ranks, and per rank, the rows of its collectives in program order.

    A sum over stages that are all on one rank is none: nobody else takes part.
    """
    everybody = tuple(range(len(plan.programs)))
    found: dict[tuple[int, ...], dict[int, list[int]]] = {everybody: {}}
    for row in np.flatnonzero(plan.columns.are(*WHOLE_MESH, SyncTied)).tolist():
        rank, index = plan.columns.place(row)
        instruction = plan.programs[rank][index]
        members = everybody
        if isinstance(instruction, SyncTied):
            members = plan.layout.ranks_of(instruction.stages)
            if len(members) == 1:
                continue
        found.setdefault(members, {}).setdefault(rank, []).append(row)
    return found


@dataclass(frozen=True)
class Events:
    """Which rows are one event: `of[row]` is its number; numbers are dense.

    `groups[row]` numbers the group of pipeline ranks of a collective; `NO_GROUP` for everything else.
    """

    columns: Columns
    channels: Channels
    groups: Ints
    of: Ints

    @classmethod
    def merge(cls, plan: Plan) -> Events:
        """Merge the k-th send of a channel with its k-th receive, and the k-th collectives of a group.

        What has no partner stands alone; `check` reports such faults before it asks for this.
        """
        columns = plan.columns
        channels = Channels.of(columns)
        leader = np.arange(len(columns))
        sent, received = channels.pairs
        leader[received] = sent
        groups = np.full(len(columns), NO_GROUP)
        for number, (members, issued) in enumerate(pipeline_collectives(plan).items()):
            for together in zip(*(issued.get(rank, ()) for rank in members), strict=False):
                leader[list(together)] = together[0]
            for rows in issued.values():
                groups[rows] = number
        return cls(columns, channels, groups, np.unique(leader, return_inverse=True)[1])

    @cached_property
    def num_events(self) -> int:
        """How many events there are."""
        return int(self.of.max(initial=-1)) + 1

    @cached_property
    def first_rows(self) -> Ints:
        """The first row of each event."""
        return np.unique(self.of, return_index=True)[1]

    def member(self, event: int, rank: int) -> int:
        """Return the event's row on `rank`, or its first one."""
        rows = np.flatnonzero(self.of == event)
        here = rows[self.columns.rank[rows] == rank]
        return int(here[0] if len(here) else rows[0])


@dataclass(frozen=True)
class EventGraph:
    """Edges `sources[i]` → `targets[i]`, each owed to rank `ranks[i]`; the target waits for the source."""

    num_events: int
    sources: Ints
    targets: Ints
    ranks: Ints

    def run(self, durations: Sequence[float] | None = None) -> Run:
        """Run every event as early as its predecessors allow; O(events + edges). Without durations, just in order."""
        num_events = self.num_events
        order = np.argsort(self.sources, kind="stable")
        first = np.searchsorted(self.sources[order], np.arange(num_events + 1)).tolist()
        following = self.targets[order].tolist()
        waiting = np.bincount(self.targets, minlength=num_events).tolist()
        if durations is None:
            return _run_in_order(first, following, waiting)
        return _run_in_time(first, following, waiting, durations)

    def cycle(self, waiting: Sequence[int]) -> list[tuple[int, int]]:
        """Return one cycle among the events that still wait, as (event, rank on which the next one waits for it).

        The way back from an event stays on a rank as long as it can: so it comes to where that rank stands, and only
        there goes over to the rank that is waited for.
        """
        stuck = np.asarray(waiting) > 0
        edges = np.flatnonzero(stuck[self.sources] & stuck[self.targets])
        columns = (self.targets[edges].tolist(), self.ranks[edges].tolist(), self.sources[edges].tolist())
        blockers: dict[int, dict[int, int]] = {}
        for target, rank, source in zip(*columns, strict=True):
            blockers.setdefault(target, {}).setdefault(rank, source)
        event, ranks = next(iter(blockers.items()))
        rank = next(iter(ranks))
        seen: dict[tuple[int, int], int] = {}
        walk: list[tuple[int, int]] = []
        while True:
            rank = rank if rank in blockers[event] else next(iter(blockers[event]))
            if (event, rank) in seen:
                return walk[seen[event, rank] :][::-1]
            seen[event, rank] = len(walk)
            event = blockers[event][rank]
            walk.append((event, rank))


def stretches(cycle: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return a cycle as (event, later event, rank), with the steps that follow each other on a rank taken as one."""
    ranks = [rank for _, rank in cycle]
    starts = [k for k, rank in enumerate(ranks) if rank != ranks[k - 1]] or list(range(len(cycle)))
    return [
        (cycle[start][0], cycle[end][0], ranks[start])
        for start, end in zip(starts, [*starts[1:], starts[0]], strict=True)
    ]


@dataclass(frozen=True)
class Run:
    """A run of an event graph: `waiting` is not 0 for events that never began; `cause` is what an event waited for."""

    num_done: int
    waiting: list[int]
    start: list[float]
    cause: list[int]

    @property
    def finished(self) -> bool:
        """Whether every event ran: exactly then the graph has no cycle."""
        return self.num_done == len(self.waiting)


def _run_in_order(first: list[int], following: list[int], waiting: list[int]) -> Run:
    ready = [event for event, count in enumerate(waiting) if not count]
    for event in ready:
        for target in following[first[event] : first[event + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return Run(len(ready), waiting, [], [])


def _run_in_time(first: list[int], following: list[int], waiting: list[int], durations: Sequence[float]) -> Run:
    start = [0.0] * len(waiting)
    cause = [-1] * len(waiting)
    ready = [event for event, count in enumerate(waiting) if not count]
    for event in ready:
        end = start[event] + durations[event]
        for target in following[first[event] : first[event + 1]]:
            if end >= start[target]:
                start[target], cause[target] = end, event
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return Run(len(ready), waiting, start, cause)


def build_graph(events: Events, flows: Flows, profile: Profile, *, one_host: bool = False) -> EventGraph:
    """Return the event graph of a plan under a transport profile; with `one_host`, as a rank's host adds to it.

    That is the graph of a proof. Without, it is the one that is timed: of queues and data alone. Under `blocking` a
    rank's one queue is its program order already.

    A value that no instruction of its own rank makes comes from the rank that makes it: so the graph of a plan
    without messages, as a schedule yields it, has the right edges too.
    """
    parts = [queue_edges(events, profile)]
    if not profile.one_queue:
        parts += [data_edges(events, flows), room_edges(events)]
        if one_host:
            parts.append(host_edges(events, profile))
    sources, targets, ranks = (np.concatenate(part) for part in zip(*parts, strict=True))
    return EventGraph(events.num_events, sources, targets, ranks)


def host_edges(events: Events, profile: Profile) -> tuple[Ints, Ints, Ints]:
    """Return (sources, targets, ranks): what a host adds that issues its program in order, and waits as it goes.

    It waits in computations and at what ends a step. Messages and other collectives it only issues, but not before it
    has come to them; where tags match messages, those are issued ahead of their place and wait for nobody.
    """
    columns = events.columns
    issued = columns.are(*ISSUED)
    waits = np.flatnonzero(~issued)
    same = columns.rank[waits[:-1]] == columns.rank[waits[1:]]
    sources, targets = [waits[:-1][same]], [waits[1:][same]]
    later = np.flatnonzero(issued & ~(columns.are(Send, Recv) & profile.matches_by_tag))
    before = np.searchsorted(waits, later) - 1
    later, before = later[before >= 0], waits[before[before >= 0]]
    same = columns.rank[before] == columns.rank[later]
    sources.append(before[same])
    targets.append(later[same])
    rows = np.concatenate(sources)
    return events.of[rows], events.of[np.concatenate(targets)], columns.rank[rows]


def queue_edges(events: Events, profile: Profile) -> tuple[Ints, Ints, Ints]:
    """Return (sources, targets, ranks): every event before the next one in its queue on a rank."""
    columns = events.columns
    queues = profile.queues(events)
    rows = np.flatnonzero(queues != NO_QUEUE)
    lines = columns.rank[rows] * (queues.max(initial=0) + 1) + queues[rows]
    order = rows[np.argsort(lines, kind="stable")]
    lines = np.sort(lines, kind="stable")
    earlier, later = order[:-1][lines[:-1] == lines[1:]], order[1:][lines[:-1] == lines[1:]]
    return events.of[earlier], events.of[later], columns.rank[earlier]


def data_edges(events: Events, flows: Flows) -> tuple[Ints, Ints, Ints]:
    """Return (sources, targets, ranks): every event that makes a value before every one that consumes or reads it."""
    columns = events.columns
    rows = np.concatenate([flows.consumes.rows, flows.reads.rows])
    keys = np.concatenate([flows.consumes.keys, flows.reads.keys])
    ranks = columns.rank[rows]
    here = first_maker(flows.produces, columns.rank, ranks, keys)
    travels = flows.of_kind(flows.produces.keys, *TRAVELS)
    travelling = Uses(flows.produces.rows[travels], flows.produces.keys[travels])
    elsewhere = first_maker(travelling, np.zeros_like(columns.rank), np.zeros_like(ranks), keys)
    makers = np.where(here >= 0, here, elsewhere)
    known = makers >= 0
    return events.of[makers[known]], events.of[rows[known]], ranks[known]


def room_edges(events: Events) -> tuple[Ints, Ints, Ints]:
    """Return (sources, targets, ranks): weights are gathered into the room of those that were dropped before."""
    columns = events.columns
    freed, gathered = (np.flatnonzero(columns.are(kind)) for kind in (FreeParams, GatherParams))
    latest = np.searchsorted(freed, gathered) - 1
    known = latest >= 0
    known[known] = columns.rank[freed[latest[known]]] == columns.rank[gathered[known]]
    gathered = gathered[known]
    return events.of[freed[latest[known]]], events.of[gathered], columns.rank[gathered]


def first_maker(makes: Uses, rank_of_row: Ints, ranks: Ints, keys: Ints) -> Ints:
    """Return the first row that makes each of the `keys` on each of the `ranks`; -1 where none does."""
    span = max(int(makes.keys.max(initial=0)), int(keys.max(initial=0))) + 1
    made, first = np.unique(rank_of_row[makes.rows] * span + makes.keys, return_index=True)
    wanted = ranks * span + keys
    if not len(made):
        return np.full(len(wanted), -1)
    found = np.minimum(np.searchsorted(made, wanted), len(made) - 1)
    return np.where(made[found] == wanted, makes.rows[first[found]], -1)
