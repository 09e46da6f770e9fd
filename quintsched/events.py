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

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quintsched.dataflow import Flows, Kind, Value
from quintsched.errors import UsageError, suggest
from quintsched.instructions import (
    WHOLE_MESH,
    AllReduceBucket,
    Instruction,
    Message,
    Send,
)
from quintsched.plan import Plan


@dataclass(frozen=True)
class Profile:
    """How a transport serialises what a rank does; `message_queue(source, destination)` None means unordered."""

    name: str
    stands_for: str
    one_queue: bool
    message_queue: Callable[[int, int], Hashable]
    collective_queue: Callable[[Hashable], Hashable]


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("blocking", "host-blocking calls; gloo's send at any size", True, lambda s, d: 0, lambda group: 0),
        Profile("single-stream", "one NCCL communicator and stream", False, lambda s, d: "wire", lambda group: "wire"),
        Profile(
            "pair-stream",
            "NCCL pair communicators made up front",
            False,
            lambda s, d: ("pair", min(s, d), max(s, d)),
            lambda group: group,
        ),
        Profile("channel", "one queue per directed channel", False, lambda s, d: (s, d), lambda group: group),
        Profile("tagged", "gloo with tags", False, lambda s, d: None, lambda group: group),
    )
}
"""Strictest first: each profile's waits include those of all that follow it."""


def find_profile(name: str) -> Profile:
    """Return the transport profile of this name; raises `UsageError`."""
    if name not in PROFILES:
        raise UsageError(f"unknown transport profile {name!r}{suggest(name, PROFILES)}")
    return PROFILES[name]


def collective_group(instruction: Instruction) -> Hashable:
    """Return the group that takes part in a collective, or None for what is no collective."""
    if isinstance(instruction, WHOLE_MESH):
        return "mesh"
    return instruction.axes if isinstance(instruction, AllReduceBucket) else None


@dataclass(frozen=True)
class Place:
    """One instruction of a plan."""

    rank: int
    index: int


@dataclass
class Events:
    """Which instructions are one event; `of[rank][index]` is the event's number."""

    of: list[list[int]]
    members: list[tuple[Place, ...]]


def channels_of(plan: Plan) -> tuple[dict[tuple[int, int], list[Place]], dict[tuple[int, int], list[Place]]]:
    """Return the sends and the receives of each channel (source, destination), in program order."""
    sends: dict[tuple[int, int], list[Place]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for rank, program in enumerate(plan.programs):
        for index, instruction in enumerate(program):
            if isinstance(instruction, Send):
                sends[rank, instruction.peer].append(Place(rank, index))
            elif isinstance(instruction, Message):
                receives[instruction.peer, rank].append(Place(rank, index))
    return sends, receives


def merge_events(plan: Plan) -> Events:
    """Number the events of a plan; the k-th send of a channel is merged with its k-th receive.

    What has no partner stands alone. `check` reports such faults before this graph is asked.
    """
    events = Events([[-1] * len(program) for program in plan.programs], [])
    sends, receives = channels_of(plan)
    for channel, sent in sends.items():
        for pair in zip(sent, receives.get(channel, ()), strict=False):
            _add_event(events, pair)
    whole_mesh = [
        [Place(rank, index) for index, i in enumerate(program) if isinstance(i, WHOLE_MESH)]
        for rank, program in enumerate(plan.programs)
    ]
    for together in zip(*whole_mesh, strict=False):
        _add_event(events, together)
    for rank, numbers in enumerate(events.of):
        for index, number in enumerate(numbers):
            if number < 0:
                _add_event(events, (Place(rank, index),))
    return events


def _add_event(events: Events, members: Sequence[Place]) -> None:
    for place in members:
        events.of[place.rank][place.index] = len(events.members)
    events.members.append(tuple(members))


@dataclass
class EventGraph:
    """Edges `sources[i]` → `targets[i]`, each owed to pp rank `ranks[i]`; the target waits for the source."""

    plan: Plan
    events: Events
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def add(self, source: int, target: int, rank: int) -> None:
        """Let `target` wait for `source` on `rank`."""
        self.sources.append(source)
        self.targets.append(target)
        self.ranks.append(rank)

    def successors(self) -> tuple[list[int], list[int]]:
        """Return (first, following): the events after event e are following[first[e]:first[e + 1]]."""
        sources = np.asarray(self.sources, dtype=np.int64)
        order = np.argsort(sources, kind="stable")
        first = np.searchsorted(sources[order], np.arange(len(self.events.members) + 1))
        return first.tolist(), np.asarray(self.targets, dtype=np.int64)[order].tolist()

    def run(self, durations: Sequence[float]) -> Run:
        """Run every event as early as its predecessors allow; O(events + edges)."""
        first, following = self.successors()
        waiting = np.bincount(self.targets, minlength=len(durations)).tolist() if self.targets else [0] * len(durations)
        start = [0.0] * len(durations)
        cause = [-1] * len(durations)
        order = [event for event, count in enumerate(waiting) if not count]
        for event in order:
            end = start[event] + durations[event]
            for target in following[first[event] : first[event + 1]]:
                if end > start[target] or cause[target] < 0:
                    start[target], cause[target] = max(end, start[target]), event
                waiting[target] -= 1
                if not waiting[target]:
                    order.append(target)
        return Run(order, start, cause, waiting)

    def cycle(self, waiting: Sequence[int]) -> list[tuple[int, int]]:
        """Return one cycle among the events that still wait, as (event, rank on which the next one waits for it)."""
        blocker: dict[int, tuple[int, int]] = {}
        for source, target, rank in zip(self.sources, self.targets, self.ranks, strict=True):
            if waiting[source] and waiting[target]:
                blocker.setdefault(target, (source, rank))
        event = next(event for event in blocker)
        seen: dict[int, int] = {}
        walk: list[tuple[int, int]] = []
        while event not in seen:
            seen[event] = len(walk)
            walk.append(blocker[event])
            event = blocker[event][0]
        return walk[seen[event] :][::-1]


@dataclass(frozen=True)
class Run:
    """A run of an event graph: `waiting` is not 0 for events that never began."""

    order: list[int]
    start: list[float]
    cause: list[int]
    waiting: list[int]

    @property
    def finished(self) -> bool:
        """Whether every event ran: exactly then the graph has no cycle."""
        return len(self.order) == len(self.start)


def build_graph(plan: Plan, flows: Flows, profile: Profile, events: Events | None = None) -> EventGraph:
    """Return the event graph of a plan under a transport profile.

    A value that no instruction of its own rank makes comes from the rank that makes it: so the graph of a plan
    without messages, as a schedule yields it, has the right edges too.
    """
    graph = EventGraph(plan, events or merge_events(plan))
    for rank, program in enumerate(plan.programs):
        _add_queues(graph, rank, program, profile)
    if not profile.one_queue:
        _add_data_flow(graph, flows)
    return graph


def _add_queues(graph: EventGraph, rank: int, program: Sequence[Instruction], profile: Profile) -> None:
    last: dict[Hashable, int] = {}
    for instruction, event in zip(program, graph.events.of[rank], strict=True):
        queue = _queue(instruction, rank, profile)
        if queue is None:
            continue
        if queue in last:
            graph.add(last[queue], event, rank)
        last[queue] = event


def _queue(instruction: Instruction, rank: int, profile: Profile) -> Hashable:
    if profile.one_queue:
        return 0
    if isinstance(instruction, Message):
        sends = isinstance(instruction, Send)
        return profile.message_queue(*((rank, instruction.peer) if sends else (instruction.peer, rank)))
    group = collective_group(instruction)
    return "compute" if group is None else profile.collective_queue(("group", group))


def _add_data_flow(graph: EventGraph, flows: Flows) -> None:
    made: list[dict[Value, int]] = []
    for numbers, program_flows in zip(graph.events.of, flows, strict=True):
        here: dict[Value, int] = {}
        for event, flow in zip(numbers, program_flows, strict=True):
            for value in flow.produces:
                here.setdefault(value, event)
        made.append(here)
    travels = (Kind.OUTPUT, Kind.OUTPUT_GRAD)
    anywhere = {value: event for here in made for value, event in here.items() if value.kind in travels}
    for rank, (numbers, program_flows) in enumerate(zip(graph.events.of, flows, strict=True)):
        here = made[rank]
        for event, flow in zip(numbers, program_flows, strict=True):
            for value in (*flow.consumes, *flow.reads):
                source = here.get(value, anywhere.get(value, -1))
                if source >= 0:
                    graph.add(source, event, rank)
