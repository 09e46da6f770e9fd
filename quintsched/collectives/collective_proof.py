"""Proof of a collective: messages match, there is no deadlock, and every rank ends with the right sums.

    well-formed → channels → deadlock → complete

A message is one event: its send and its receive. It waits for all messages of the previous step on both of its
ranks. That models a host that blocks in each step, the profile `blocking` of plans; a program that is free of deadlock
there is free under every other profile. Then the events are run in order on symbols instead of data:

    brought by r     contribution of rank r: to every chunk, or (all-gather) to the chunks of its own part
    rest on r        undefined former contents of the other chunks: to send them, or to add to them, is a fault
    a sum            of two symbols that have no rank in common; the sums that an all-reduce leaves must be added in
                     the same order on all ranks, or the replicas would drift apart by rounding

A reduce-scatter leaves other ranks' parts undefined, so these are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quintsched.collectives.collective_program import (
    COLLECTIVE_KINDS,
    ChunkMessage,
    CollectiveProgram,
    CollectiveStep,
    Half,
    RecvChunk,
    SendChunk,
    SendRecv,
)
from quintsched.errors import UnsoundError, counted
from quintsched.graph.event_graph import EventGraph, stretches
from quintsched.ir.diagnostics import Finding, Point

MOST_COLLECTIVE_FINDINGS = 10


@dataclass(frozen=True)
class CollectiveVerdict:
    """Result of `prove`; the findings' ranks are those of the axis."""

    plan: CollectiveProgram
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def explain(self) -> str:
        """Return the verdict as text."""
        if self.sound:
            return (
                f"sound: {self.plan.title}; {counted(len(self.plan.messages), 'message')}, free of deadlock under "
                f"blocking; {_PROMISES[self.plan.kind]}"
            )
        lines = [f"{finding.point.value}: {finding.message}" for finding in self.findings[:MOST_COLLECTIVE_FINDINGS]]
        more = len(self.findings) - len(lines)
        return "\n".join([f"not sound: {self.plan.title}", *lines, *([f"… and {more} more"] if more else [])])

    def raise_if_unsound(self) -> None:
        """Raise `UnsoundError` with the explanation unless the collective is sound."""
        if not self.sound:
            raise UnsoundError(self.explain())


_PROMISES = {
    "all_reduce": "every rank ends with every chunk's sum, each contribution in it once, added up in the same order",
    "reduce_scatter": "every rank ends with the sum of its part, each contribution in it once",
    "all_gather": "every rank ends with every rank's part, whatever stood there before",
}


def prove(plan: CollectiveProgram) -> CollectiveVerdict:
    """Prove a collective, see the module; the first kind of fault ends the proof."""
    for stage in (_malformed, _broken_channels, _deadlock, _incomplete):
        if findings := tuple(stage(plan)):
            return CollectiveVerdict(plan, findings)
    return CollectiveVerdict(plan, ())


def event_graph(plan: CollectiveProgram) -> EventGraph:
    """Return the event graph: one event per message, which waits for all messages of the previous step of its ranks."""
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


def _malformed(plan: CollectiveProgram) -> Iterator[Finding]:
    if len(plan.programs) != plan.size:
        yield Finding(Point.WELL_FORMED, f"there are {len(plan.programs)} programs for {counted(plan.size, 'rank')}")
        return
    if plan.kind not in COLLECTIVE_KINDS:
        yield Finding(Point.WELL_FORMED, f"there is no collective {plan.kind!r}")
    if plan.size < 2 or plan.chunks < 1:
        message = (
            f"{counted(plan.size, 'rank')} and {counted(plan.chunks, 'chunk')}: it takes at least two ranks and a chunk"
        )
        yield Finding(Point.WELL_FORMED, message)
        return
    if plan.kind != "all_reduce" and plan.chunks % plan.size:
        message = (
            f"{counted(plan.chunks, 'chunk')} cannot be divided into a part for each of {counted(plan.size, 'rank')}"
        )
        yield Finding(Point.WELL_FORMED, message)
    for rank, program in enumerate(plan.programs):
        for index, step in enumerate(program):
            if fault := _fault(plan, rank, step):
                message = f"rank {rank} step {index}, {step}: {fault}"
                yield Finding(Point.WELL_FORMED, message, rank, index)


def _fault(plan: CollectiveProgram, rank: int, step: CollectiveStep) -> str | None:
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


def _broken_channels(plan: CollectiveProgram) -> Iterator[Finding]:
    """Yield a finding for each message whose k-th receive expects another chunk, and for each unmatched end."""
    matched: set[Half] = set()
    for sent, received in plan.messages:
        matched |= {sent, received}
        if sent.chunk != received.chunk:
            message = (
                f"channel {sent.rank}→{received.rank}: {plan.half_place(sent)} sends chunk {sent.chunk}, but "
                f"{plan.half_place(received)} expects chunk {received.chunk}"
            )
            yield Finding(Point.CHANNELS, message, received.rank, received.step)
    for verb, halves in zip(("receives what it sends", "sends what it waits for"), plan.halves, strict=True):
        for half in (half for half in halves if half not in matched):
            yield Finding(
                Point.CHANNELS, f"{plan.half_place(half)}: rank {half.peer} never {verb}", half.rank, half.step
            )


def _deadlock(plan: CollectiveProgram) -> Iterator[Finding]:
    graph = event_graph(plan)
    run = graph.run_events()
    if run.finished:
        return
    waits = stretches(graph.cycle(run.waiting))
    yield Finding(Point.DEADLOCK, f"{len(waits)} waits close a circle; a message ends when both its ends have begun:")
    for event, following, rank in waits:
        here, there = (_end_on(plan.messages[e], rank) for e in (event, following))
        message = f"rank {rank}: {plan.half_place(here)} must end before {plan.half_place(there)} can begin"
        yield Finding(Point.DEADLOCK, message, rank, here.step)


def _end_on(message: ChunkMessage, rank: int) -> Half:
    return message.sent if message.sent.rank == rank else message.received


def _incomplete(plan: CollectiveProgram) -> Iterator[Finding]:
    """Run the messages on symbols, and yield a finding for each wrong move and each wrong result."""
    sums = ChunkSums(plan.size)
    held = [[_at_first(plan, rank, chunk) for chunk in range(plan.chunks)] for rank in range(plan.size)]
    before: dict[tuple[int, int], int] = {}
    for sent, received in _in_order(plan):
        came = before.get((sent.rank, sent.step), held[sent.rank][sent.chunk])
        there = held[received.rank][received.chunk]
        yield from _wrongly_moved(plan, sums, sent, received, came, there)
        if _sends_same(plan.programs[received.rank][received.step]):
            before[received.rank, received.step] = there  # the send half of this step sends the old contents
        held[received.rank][received.chunk] = sums.add_symbols(came, there) if received.reduce else came
    for rank, chunks in enumerate(held):
        for chunk, found in enumerate(chunks):
            if fault := _wrong_at_last(plan, sums, rank, chunk, found, held[0][chunk]):
                yield Finding(Point.COMPLETE, f"rank {rank} ends with a chunk {chunk} that {fault}", rank)


def _wrongly_moved(
    plan: CollectiveProgram, sums: ChunkSums, sent: Half, received: Half, came: int, there: int
) -> Iterator[Finding]:
    """Yield the faults of a message that carries the symbol `came` to a chunk that holds `there`."""
    if sums.holds_rest(came):
        message = f"{plan.half_place(sent)} sends chunk {sent.chunk}, of which it has nothing yet"
        yield Finding(Point.COMPLETE, message, sent.rank, sent.step)
    if not received.reduce:
        return
    where = received.rank, received.step
    if sums.holds_rest(there):
        message = f"{plan.half_place(received)} adds to chunk {received.chunk}, of which it has nothing yet"
        yield Finding(Point.COMPLETE, f"{message}: what stood there before would be in the sum", *where)
    twice = sums.brought(came) & sums.brought(there)
    if twice:
        brought = f"what rank {_names(twice)} brought to chunk {received.chunk}"
        message = f"{plan.half_place(received)} adds {brought} a second time"
        yield Finding(Point.COMPLETE, message, *where)


def _wrong_at_last(
    plan: CollectiveProgram, sums: ChunkSums, rank: int, chunk: int, found: int, on_the_first: int
) -> str | None:
    """Return the fault of a chunk at the end, or None; `on_the_first` is rank 0's symbol for it."""
    wanted = _at_last(plan, rank, chunk)
    if wanted is None:
        return None
    brought = sums.brought(found)
    if wanted & ~brought:
        return f"lacks what rank {_names(wanted & ~brought)} brings"
    if brought != wanted or sums.holds_rest(found):
        return "holds too much"
    if plan.kind == "all_reduce" and found != on_the_first:
        return "was added up in another order than that of rank 0: rounded, the two sums differ"
    return None


def _in_order(plan: CollectiveProgram) -> list[ChunkMessage]:
    """Return the messages in a topological order."""
    graph = event_graph(plan)
    starts = graph.starts(np.ones(len(plan.messages)), np.array(graph.run_events().order))
    order: Sequence[int] = np.argsort(starts, kind="stable").tolist()
    return [plan.messages[event] for event in order]


def _sends_same(step: CollectiveStep) -> bool:
    return isinstance(step, SendRecv) and step.send_chunk == step.recv_chunk


def _at_first(plan: CollectiveProgram, rank: int, chunk: int) -> int:
    """Return the symbol of a chunk at the start: the rank's contribution, or undefined contents."""
    brings = plan.kind != "all_gather" or plan.owner(chunk) == rank
    return rank if brings else plan.size + rank


def _at_last(plan: CollectiveProgram, rank: int, chunk: int) -> int | None:
    """Return the required contributors (bit r: rank r) of a chunk at the end; None if they do not matter."""
    if plan.kind == "all_gather":
        return 1 << plan.owner(chunk)
    if plan.kind == "reduce_scatter" and plan.owner(chunk) != rank:
        return None
    return (1 << plan.size) - 1


class ChunkSums:
    """Symbols for contents of chunks: 0 … size-1 are the ranks' contributions, size … 2 size-1 undefined contents.

    A sum of the same two symbols is the same symbol, in either order: addition commutes in floating point too.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: dict[tuple[int, int], int] = {}
        self._held = [1 << symbol for symbol in range(2 * size)]

    def add_symbols(self, one: int, other: int) -> int:
        """Return the symbol of a sum."""
        pair = min(one, other), max(one, other)
        if pair not in self._made:
            self._made[pair] = len(self._held)
            self._held.append(self._held[one] | self._held[other])
        return self._made[pair]

    def brought(self, symbol: int) -> int:
        """Return the ranks (bit r: rank r) that contributed to a symbol."""
        return self._held[symbol] & ((1 << self._size) - 1)

    def holds_rest(self, symbol: int) -> bool:
        """Return whether undefined contents are part of a symbol."""
        return self._held[symbol] >> self._size > 0


def _names(contributions: int) -> str:
    ranks = [rank for rank in range(contributions.bit_length()) if contributions >> rank & 1]
    return ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
