"""A graph of events and what each waits for: run it in order or in time, or find the cycle that stops it.

    0 ──▶ 1 ──▶ 3        an event begins when all that it waits for has ended;
    └───▶ 2 ────┘        what never begins is on a cycle, or behind one

It knows nothing of plans: plans and spelled-out collectives are both judged and timed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quintsched.ir.columns import Ints

NONE = -1
COLUMNS = 3
"""How many successors of an event stand in lists of their own; of most events there are no more."""


@dataclass(frozen=True)
class EventGraph:
    """Edges `sources[i]` → `targets[i]`, each owed to rank `ranks[i]`; the target waits for the source."""

    num_events: int
    sources: Ints
    targets: Ints
    ranks: Ints

    def run(self, durations: Sequence[float] | None = None) -> Run:
        """Run every event as early as its predecessors allow; O(events + edges). Without durations, just in order."""
        successors = Successors.of(self.num_events, self.sources, self.targets)
        if durations is None:
            return successors.run_in_order()
        return successors.run_in_time(durations)

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


@dataclass(frozen=True, eq=False)
class Successors:
    """The events that wait for each event: `columns[k][v]` is the k-th of event v, or `NONE`; `more` has the rest.

    `waiting` says how many each waits for. An edge that is there several times counts once.
    """

    columns: list[list[int]]
    more: dict[int, list[int]]
    waiting: list[int]

    @classmethod
    def of(cls, num_events: int, sources: Ints, targets: Ints) -> Successors:
        """Sort edges by their source, in the order given."""
        columns: list[list[int]] = []
        waiting = np.zeros(num_events, np.int64)
        for _ in range(COLUMNS):
            column = np.full(num_events, NONE)
            column[sources[::-1]] = targets[::-1]
            waiting += np.bincount(column[column != NONE], minlength=num_events)
            columns.append(column.tolist())
            rest = column[sources] != targets
            sources, targets = sources[rest], targets[rest]
        more: dict[int, list[int]] = {}
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            more.setdefault(source, []).append(target)
        waiting += np.bincount(targets, minlength=num_events)
        return cls(columns, more, waiting.tolist())

    def run_in_order(self) -> Run:
        """Run every event that can."""
        waiting, more = self.waiting, self.more
        first, second, third = self.columns
        ready = [event for event, count in enumerate(waiting) if not count]
        for event in ready:
            for target in (first[event], second[event], third[event], *more.get(event, ())):
                if target != NONE:
                    waiting[target] -= 1
                    if not waiting[target]:
                        ready.append(target)
        return Run(len(ready), waiting, [], [])

    def run_in_time(self, durations: Sequence[float]) -> Run:
        """Run every event that can, as early as it can."""
        waiting, more = self.waiting, self.more
        first, second, third = self.columns
        start, cause = [0.0] * len(waiting), [NONE] * len(waiting)
        ready = [event for event, count in enumerate(waiting) if not count]
        append = ready.append
        for event in ready:
            end = start[event] + durations[event]
            target = first[event]
            if target >= 0:
                if end >= start[target]:
                    start[target], cause[target] = end, event
                waiting[target] -= 1
                if not waiting[target]:
                    append(target)
                target = second[event]
                if target >= 0:
                    if end >= start[target]:
                        start[target], cause[target] = end, event
                    waiting[target] -= 1
                    if not waiting[target]:
                        append(target)
                    target = third[event]
                    if target >= 0:
                        for other in chain((target,), more.get(event, ())):
                            if end >= start[other]:
                                start[other], cause[other] = end, event
                            waiting[other] -= 1
                            if not waiting[other]:
                                append(other)
        return Run(len(ready), waiting, start, cause)
