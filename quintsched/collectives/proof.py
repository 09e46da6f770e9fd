"""The proof of a collective: its messages match, nobody waits in a circle, and every rank ends with every sum.

    well-formed → channels → deadlock → complete

A message is one event: its send and its receive. It waits for all messages of the step before it, on both of its
ranks: so runs a host that blocks in each step, the profile `blocking` of plans. What is free of deadlock there is free
under every other profile. Then the events are run in order with symbols for data: a chunk is the set of ranks whose
contributions are in it, and adding two sets that have a rank in common is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quintsched.collectives.program import ChunkMessage, CollectivePlan, Half, RecvChunk, SendChunk, SendRecv, Step
from quintsched.errors import UnsoundError
from quintsched.graph.event_graph import EventGraph, stretches
from quintsched.verify.diagnostics import Finding, Point

MOST_FINDINGS = 10


@dataclass(frozen=True)
class CollectiveVerdict:
    """What `prove` found; the findings' ranks are those of the axis."""

    plan: CollectivePlan
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether all points hold."""
        return not self.findings

    def explain(self) -> str:
        """Return the verdict in words."""
        if self.sound:
            return (
                f"sound: {self.plan.title}; {len(self.plan.messages)} messages, free of deadlock under blocking; "
                f"{_PROMISES[self.plan.kind]}"
            )
        lines = [f"{finding.point.value}: {finding.message}" for finding in self.findings[:MOST_FINDINGS]]
        more = len(self.findings) - len(lines)
        return "\n".join([f"not sound: {self.plan.title}", *lines, *([f"… and {more} more"] if more else [])])

    def raise_if_unsound(self) -> None:
        """Raise `UnsoundError` with the explanation unless the collective is sound."""
        if not self.sound:
            raise UnsoundError(self.explain())


_PROMISES = {
    "all_reduce": "every rank ends with every chunk's sum, each contribution in it once",
    "reduce_scatter": "every rank ends with the sum of its part, each contribution in it once",
    "all_gather": "every rank ends with every rank's part",
}


def prove(plan: CollectivePlan) -> CollectiveVerdict:
    """Prove a collective; see the module."""
    for stage in (_malformed, _broken_channels, _deadlock, _incomplete):
        if findings := tuple(stage(plan)):
            return CollectiveVerdict(plan, findings)
    return CollectiveVerdict(plan, ())


def event_graph(plan: CollectivePlan) -> EventGraph:
    """Return the events, one per entry of `messages`, and what each waits for: all of the step before on its ranks."""
    at: list[list[list[int]]] = [[[] for _ in program] for program in plan.programs]
    for event, message in enumerate(plan.messages):
        for half in message:
            at[half.rank][half.step].append(event)
    edges = [
        (earlier, later, rank)
        for rank, steps in enumerate(at)
        for before, after in pairwise(steps)
        for earlier in before
        for later in after
    ]
    sources, targets, ranks = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    return EventGraph(len(plan.messages), sources, targets, ranks)


def _malformed(plan: CollectivePlan) -> Iterator[Finding]:
    if len(plan.programs) != plan.size:
        yield Finding(Point.WELL_FORMED, f"there are {len(plan.programs)} programs for {plan.size} ranks")
        return
    if plan.kind != "all_reduce" and plan.chunks % plan.size:
        message = f"{plan.chunks} chunks do not divide into a part for each of {plan.size} ranks"
        yield Finding(Point.WELL_FORMED, message)
    for rank, program in enumerate(plan.programs):
        for index, step in enumerate(program):
            if fault := _fault(plan, rank, step):
                message = f"rank {rank} step {index}, {step}: {fault}"
                yield Finding(Point.WELL_FORMED, message, rank, index)


def _fault(plan: CollectivePlan, rank: int, step: Step) -> str | None:
    peers: tuple[int, ...]
    chunks: tuple[int, ...]
    match step:
        case SendRecv():
            peers, chunks = (step.to, step.source), (step.send_chunk, step.recv_chunk)
            if step.send_chunk == step.recv_chunk and not step.reduce:
                return "it overwrites the chunk that it sends"
        case SendChunk():
            peers, chunks = (step.to,), (step.chunk,)
        case RecvChunk():
            peers, chunks = (step.source,), (step.chunk,)
    for peer in peers:
        if not 0 <= peer < plan.size or peer == rank:
            return f"rank {peer} is not another one of the {plan.size} ranks"
    for chunk in chunks:
        if not 0 <= chunk < plan.chunks:
            return f"chunk {chunk} is not one of the {plan.chunks}"
    return None


def _broken_channels(plan: CollectivePlan) -> Iterator[Finding]:
    """Order is identity: the k-th send of a channel is what its k-th receive expects."""
    matched: set[Half] = set()
    for sent, received in plan.messages:
        matched |= {sent, received}
        if sent.chunk != received.chunk:
            message = (
                f"channel {sent.rank}→{received.rank}: {plan.at(sent)} sends chunk {sent.chunk}, but "
                f"{plan.at(received)} expects chunk {received.chunk}"
            )
            yield Finding(Point.CHANNELS, message, received.rank, received.step)
    for verb, halves in zip(("receives what it sends", "sends what it waits for"), plan.halves, strict=True):
        for half in (half for half in halves if half not in matched):
            yield Finding(Point.CHANNELS, f"{plan.at(half)}: rank {half.peer} never {verb}", half.rank, half.step)


def _deadlock(plan: CollectivePlan) -> Iterator[Finding]:
    graph = event_graph(plan)
    run = graph.run()
    if run.finished:
        return
    waits = stretches(graph.cycle(run.waiting))
    yield Finding(Point.DEADLOCK, f"{len(waits)} waits close a circle; a message ends when both its ends have begun:")
    for event, following, rank in waits:
        here, there = (_end_on(plan.messages[e], rank) for e in (event, following))
        message = f"rank {rank}: {plan.at(here)} must end before {plan.at(there)} can begin"
        yield Finding(Point.DEADLOCK, message, rank, here.step)


def _end_on(message: ChunkMessage, rank: int) -> Half:
    return message.sent if message.sent.rank == rank else message.received


def _incomplete(plan: CollectivePlan) -> Iterator[Finding]:
    """Run the messages with sets of contributions (bit r: that of rank r) for data."""
    held = [[_at_first(plan, rank, chunk) for chunk in range(plan.chunks)] for rank in range(plan.size)]
    before: dict[tuple[int, int], int] = {}
    for sent, received in _in_order(plan):
        came = before.get((sent.rank, sent.step), held[sent.rank][sent.chunk])
        there = held[received.rank][received.chunk]
        where = received.rank, received.step
        if not came:
            message = f"{plan.at(sent)} sends chunk {sent.chunk}, of which it has nothing yet"
            yield Finding(Point.COMPLETE, message, sent.rank, sent.step)
        if received.reduce and came & there:
            twice = _names(came & there)
            message = f"{plan.at(received)} adds what rank {twice} brought to chunk {received.chunk} a second time"
            yield Finding(Point.COMPLETE, message, *where)
        if _sends_same(plan.programs[received.rank][received.step]):
            before[where] = there  # the other half of the step goes out as it was
        held[received.rank][received.chunk] = came | there if received.reduce else came
    for rank, chunks in enumerate(held):
        for chunk, found in enumerate(chunks):
            wanted = _at_last(plan, rank, chunk)
            if wanted is not None and found != wanted:
                lacks = f"lacks what rank {_names(wanted & ~found)} brings" if wanted & ~found else "holds too much"
                yield Finding(Point.COMPLETE, f"rank {rank} ends with a chunk {chunk} that {lacks}", rank)


def _in_order(plan: CollectivePlan) -> list[ChunkMessage]:
    """Return the messages so that each comes after all that it waits for."""
    graph = event_graph(plan)
    starts = graph.starts(np.ones(len(plan.messages)), np.array(graph.run().order))
    order: Sequence[int] = np.argsort(starts, kind="stable").tolist()
    return [plan.messages[event] for event in order]


def _sends_same(step: Step) -> bool:
    return isinstance(step, SendRecv) and step.send_chunk == step.recv_chunk


def _at_first(plan: CollectivePlan, rank: int, chunk: int) -> int:
    return 1 << rank if plan.kind != "all_gather" or plan.owner(chunk) == rank else 0


def _at_last(plan: CollectivePlan, rank: int, chunk: int) -> int | None:
    """Return what has to be in a chunk at the end; None where that does not matter."""
    if plan.kind == "all_gather":
        return 1 << plan.owner(chunk)
    if plan.kind == "reduce_scatter" and plan.owner(chunk) != rank:
        return None
    return (1 << plan.size) - 1


def _names(contributions: int) -> str:
    ranks = [rank for rank in range(contributions.bit_length()) if contributions >> rank & 1]
    return ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
