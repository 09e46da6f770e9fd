"""The proof that a plan is sound, or the counter-example in words.

    well-formed → 1 complete → 2 data flow → 3 channels → 5 collectives → 4 deadlock → 6 memory

One pipeline proves all replicas: they run the same programs, and mapping a rank to its pp coordinate maps a cycle
to a cycle. Each finding names a pipeline rank, an index in its program and what stands there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from quintsched.costs import Costs
from quintsched.dataflow import AMBIENT, Flow, Flows, Value, flows_of, message_value
from quintsched.errors import UnsoundError, UsageError
from quintsched.events import (
    PROFILES,
    EventGraph,
    Events,
    Place,
    build_graph,
    channels_of,
    find_profile,
    merge_events,
)
from quintsched.grid import excerpt
from quintsched.instructions import WHOLE_MESH, Bwd, Compute, Fwd, Instruction, Message
from quintsched.memory import peak_activations, peak_receives
from quintsched.plan import Plan
from quintsched.wellformed import malformations

MOST_FINDINGS = 10


class Point(Enum):
    """What a finding offends against (the points of a sound plan)."""

    WELL_FORMED = "well-formed"
    COMPLETE = "complete"
    DATA_FLOW = "data flow"
    CHANNELS = "channels"
    DEADLOCK = "deadlock"
    COLLECTIVES = "collectives"
    MEMORY = "memory"


@dataclass(frozen=True)
class Finding:
    """One fault, in words that hold the place; `rank` is a pp rank, `index` counts in its program."""

    point: Point
    message: str
    rank: int | None = None
    index: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What `check` found. `profiles` says under which transport profiles the plan is free of deadlock."""

    plan: Plan
    findings: tuple[Finding, ...]
    profiles: dict[str, bool]
    peak_activations: tuple[float, ...]
    peak_receives: tuple[int, ...]

    @property
    def sound(self) -> bool:
        """Whether all points hold."""
        return not self.findings

    def explain(self) -> str:
        """Return the verdict in words: the proof's figures, or each finding with the cells of the grid marked."""
        if self.sound:
            free = ", ".join(name for name, is_free in self.profiles.items() if is_free)
            activations, receives = max(self.peak_activations, default=0), max(self.peak_receives, default=0)
            return (
                f"sound: {self.plan.num_instructions} instructions on {self.plan.mesh.pp} pipeline ranks; "
                f"free of deadlock under {free}; at most {activations:g} microbatches' activations "
                f"and {receives} received messages stand on a rank"
            )
        cycle = [finding for finding in self.findings if finding.point is Point.DEADLOCK]
        shown = [finding for finding in self.findings if finding not in cycle][:MOST_FINDINGS] + cycle
        lines = [f"{finding.point.value}: {finding.message}" for finding in shown]
        if len(self.findings) > len(shown):
            lines.append(f"… and {len(self.findings) - len(shown)} more")
        places = [(f.rank, f.index) for f in shown if f.rank is not None and f.index is not None]
        return "\n".join([f"not sound: {self.plan.title}", *lines, *excerpt(self.plan, places)])

    def raise_if_unsound(self) -> None:
        """Raise `UnsoundError` with the explanation unless the plan is sound."""
        if not self.sound:
            raise UnsoundError(self.explain())


def check(plan: Plan, profile: str = "channel", memory_cap: float | None = None) -> Verdict:
    """Prove a plan sound; see the module. Raises `UsageError` for an unknown profile or a cap below 0 only."""
    find_profile(profile)
    if memory_cap is not None and not memory_cap >= 0:
        raise UsageError(f"memory cap {memory_cap:g}: give the most activations a rank may hold, at least 0")
    malformed = _malformed(plan)
    if malformed:
        return Verdict(plan, tuple(malformed), {}, (), ())
    flows = flows_of(plan.programs, plan.layout)
    findings = [*_incomplete(plan), *_broken_flow(plan, flows), *_broken_channels(plan), *_broken_collectives(plan)]
    profiles: dict[str, bool] = {}
    if not any(finding.point in (Point.CHANNELS, Point.COLLECTIVES) for finding in findings):
        profiles, cycles = _deadlocks(plan, flows, any(f.point is Point.DATA_FLOW for f in findings))
        findings += cycles.get(profile, [])
    activations = peak_activations(plan, flows, Costs())
    findings += _over_cap(activations, memory_cap)
    return Verdict(plan, tuple(findings), profiles, activations, peak_receives(plan, flows))


def check_order(plan: Plan) -> Verdict:
    """Prove what a bare order of computation owes: that it is well-formed and complete, and nothing else yet."""
    findings = _malformed(plan) or list(_incomplete(plan))
    return Verdict(plan, tuple(findings), {}, (), ())


def _malformed(plan: Plan) -> list[Finding]:
    return [Finding(Point.WELL_FORMED, m.message, m.rank, m.index) for m in malformations(plan)]


def _at(plan: Plan, rank: int, index: int) -> str:
    return f"rank {rank} instruction {index}, {plan.programs[rank][index]}"


def _incomplete(plan: Plan) -> Iterator[Finding]:
    """Point 1: each microbatch exactly once forward (and backward) on each stage of its route."""
    kinds: tuple[type[Compute], ...] = (Fwd, Bwd) if plan.mode == "train" else (Fwd,)
    for rank, program in enumerate(plan.programs):
        done = Counter((type(i), i.stage, i.microbatch) for i in program if isinstance(i, Compute))
        for kind in kinds:
            for stage in plan.layout.stages_of(rank):
                for microbatch in plan.layout.microbatches_of(stage):
                    times = done.pop((kind, stage, microbatch), 0)
                    if times != 1:
                        what = kind(stage, microbatch)
                        yield Finding(Point.COMPLETE, f"rank {rank} runs {what} {times} times instead of once", rank)
        for extra in done:
            what = extra[0](extra[1], extra[2])
            yield Finding(Point.COMPLETE, f"rank {rank} runs {what}, which has no place in a {plan.mode} plan", rank)


def _broken_flow(plan: Plan, flows: Flows) -> Iterator[Finding]:
    """Point 2: whatever is needed was made before, made once, and nothing is left over."""
    for rank, program_flows in enumerate(flows):
        yield from _broken_flow_of_rank(plan, rank, program_flows)


def _broken_flow_of_rank(plan: Plan, rank: int, flows: Sequence[Flow]) -> Iterator[Finding]:
    live: dict[Value, int] = {}
    gone: dict[Value, int] = {}
    missed: set[Value] = set()
    for index, flow in enumerate(flows):
        for value in (*flow.consumes, *flow.reads):
            if value not in live:
                yield _missing(plan, rank, index, value, gone, flows)
        for value in flow.consumes:
            if value in live:
                gone[value] = index
                del live[value]
            else:
                missed.add(value)
        for value in flow.produces:
            if value in live or value in gone:
                first = live.get(value, gone.get(value, index))
                message = f"{_at(plan, rank, index)} makes {value} a second time; see instruction {first}"
                yield Finding(Point.DATA_FLOW, message, rank, index)
            if value in missed:
                missed.remove(value)  # who takes it has been reported: it comes too late
                gone[value] = index
            else:
                live[value] = index
    for value, index in live.items():
        if value.kind not in AMBIENT:
            message = f"{_at(plan, rank, index)} makes {value}, and nothing on rank {rank} takes it"
            yield Finding(Point.DATA_FLOW, message, rank, index)


def _missing(plan: Plan, rank: int, index: int, value: Value, gone: dict[Value, int], flows: Sequence[Flow]) -> Finding:
    if value in gone:
        why = f"which {_at(plan, rank, gone[value])} has already taken"
    else:
        later = next((i for i in range(index, len(flows)) if value in flows[i].produces), None)
        why = "which nothing on its rank makes" if later is None else f"made only later, by {_at(plan, rank, later)}"
    return Finding(Point.DATA_FLOW, f"{_at(plan, rank, index)} needs {value}, {why}", rank, index)


def _broken_channels(plan: Plan) -> Iterator[Finding]:
    """Point 3: the k-th send of a channel is what its k-th receive expects."""
    sends, receives = channels_of(plan)
    for channel in sorted({*sends, *receives}):
        sent, received = sends.get(channel, []), receives.get(channel, [])
        name = f"channel {channel[0]}→{channel[1]}"
        for k, (source, target) in enumerate(zip(sent, received, strict=False)):
            if _carried(plan, source) != _carried(plan, target):
                message = (
                    f"{name}, message {k}: {_at(plan, source.rank, source.index)} sends {_carried(plan, source)}, but "
                    f"{_at(plan, target.rank, target.index)} expects {_carried(plan, target)}; order is identity"
                )
                yield Finding(Point.CHANNELS, message, target.rank, target.index)
                break
        if len(sent) != len(received):
            lonely = (sent if len(sent) > len(received) else received)[min(len(sent), len(received))]
            message = (
                f"{name}: {len(sent)} sends but {len(received)} receives; no partner for "
                f"{_at(plan, lonely.rank, lonely.index)}"
            )
            yield Finding(Point.CHANNELS, message, lonely.rank, lonely.index)


def _carried(plan: Plan, place: Place) -> Value:
    message = plan.programs[place.rank][place.index]
    assert isinstance(message, Message)
    return message_value(message, plan.layout)


def _broken_collectives(plan: Plan) -> Iterator[Finding]:
    """Point 5: all pipeline ranks issue the same whole-mesh collectives in the same order."""
    orders = [[(index, type(i)) for index, i in enumerate(p) if isinstance(i, WHOLE_MESH)] for p in plan.programs]
    for rank, order in enumerate(orders):
        kinds, expected = [kind for _, kind in order], [kind for _, kind in orders[0]]
        if kinds != expected:
            message = (
                f"rank {rank} issues {_names(kinds)} over the whole mesh, but rank 0 issues {_names(expected)}; "
                "all members must issue the same collectives in the same order"
            )
            yield Finding(Point.COLLECTIVES, message, rank, order[0][0] if order else None)


def _names(kinds: Sequence[type[Instruction]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds) or "nothing"


def _deadlocks(plan: Plan, flows: Flows, broken_flow: bool) -> tuple[dict[str, bool], dict[str, list[Finding]]]:
    """Point 4 for every profile, strictest first: the first that is free makes the later ones free.

    Not so with a broken data flow: the later ones wait for a value that comes too late, `blocking` for nothing.
    """
    events = merge_events(plan)
    free: dict[str, bool] = {}
    found: dict[str, list[Finding]] = {}
    for name, profile in PROFILES.items():
        graph = build_graph(plan, flows, profile, events)
        run = graph.run([0.0] * len(events.members))
        free[name] = run.finished
        if run.finished and not broken_flow:
            return dict.fromkeys(PROFILES, True) | free, found
        if not run.finished:
            found[name] = _describe_cycle(graph, events, graph.cycle(run.waiting), name)
    return free, found


def _describe_cycle(graph: EventGraph, events: Events, cycle: Sequence[tuple[int, int]], name: str) -> list[Finding]:
    """Say a cycle rank by rank: on each rank of it, what has to end before what can begin."""
    lines = []
    for event, following, rank in _stretches(cycle):
        here, there = _member(events, event, rank), _member(events, following, rank)
        lines.append(
            Finding(
                Point.DEADLOCK,
                f"rank {rank}: {_where(graph.plan, here)} must end before {_where(graph.plan, there)} can begin",
                rank,
                there.index,
            )
        )
    head = Finding(
        Point.DEADLOCK,
        f"under the transport profile {name!r} {len(lines)} waits close a circle; a message ends only when "
        "both its ends have begun:",
    )
    return [head, *lines]


def _stretches(cycle: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return a cycle as (event, later event, rank), with the steps that follow each other on a rank taken as one."""
    ranks = [rank for _, rank in cycle]
    starts = [k for k, rank in enumerate(ranks) if rank != ranks[k - 1]] or list(range(len(cycle)))
    return [
        (cycle[start][0], cycle[end][0], ranks[start])
        for start, end in zip(starts, [*starts[1:], starts[0]], strict=True)
    ]


def _member(events: Events, event: int, rank: int) -> Place:
    return next((place for place in events.members[event] if place.rank == rank), events.members[event][0])


def _where(plan: Plan, place: Place) -> str:
    return f"{place.index} {plan.programs[place.rank][place.index]}"


def _over_cap(activations: Sequence[float], cap: float | None) -> Iterator[Finding]:
    """Point 6: under the cap, if one was given."""
    for rank, peak in enumerate(activations):
        if cap is not None and peak > cap:
            message = f"rank {rank} holds up to {peak:g} microbatches' activations; the cap is {cap:g}"
            yield Finding(Point.MEMORY, message, rank)
