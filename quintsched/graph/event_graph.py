"""Dependency graph of events: topological order, earliest start times, and the cycle that causes a deadlock.

    0 ──▶ 1 ──▶ 3        an event begins when all its predecessors have ended;
    └───▶ 2 ────┘        an event that never begins is on a cycle, or depends on one

It is independent of plans: both plans and spelled-out collectives are proved and timed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.ir.instruction_columns import Ints

Times: TypeAlias = npt.NDArray[np.float64]

NONE = -1
COLUMNS = 3
"""Number of neighbours of an event that are stored in columns; most events have no more."""


@dataclass(frozen=True, eq=False)
class EventRun:
    """Result of a run: `order` lists events as they ran, `waiting` counts unmet dependencies (0 for those that ran)."""

    order: list[int]
    waiting: list[int]

    @property
    def finished(self) -> bool:
        """Whether every event ran: exactly then the graph has no cycle."""
        return len(self.order) == len(self.waiting)


@dataclass(frozen=True, eq=False)
class EventGraph:
    """Edges `sources[i]` → `targets[i]` (the target waits), each with the rank `ranks[i]` on which it waits."""

    num_events: int
    sources: Ints
    targets: Ints
    ranks: Ints

    def run_events(self) -> EventRun:
        """Run every event whose dependencies can be met (Kahn's algorithm); O(events + edges)."""
        successors = _Neighbours.from_edges(self.num_events, self.sources, self.targets)
        first, second, third = (column.tolist() for column in successors.columns)
        counts = [np.bincount(c[c != NONE], minlength=self.num_events) for c in successors.columns]
        waiting: list[int] = np.sum(counts, axis=0).tolist()
        for targets in successors.more.values():
            for target in targets:
                waiting[target] += 1
        ready = [event for event, count in enumerate(waiting) if not count]
        for event in ready:
            target = first[event]
            if target < 0:
                continue
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
            target = second[event]
            if target < 0:
                continue
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
            target = third[event]
            if target < 0:
                continue
            for other in (target, *successors.more.get(event, ())):
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return EventRun(ready, waiting)

    def agrees(self, order: Ints) -> bool:
        """Return whether an order of all events is topological."""
        place = np.empty(self.num_events, np.int64)
        place[order] = np.arange(self.num_events)
        return bool((place[self.sources] < place[self.targets]).all())

    def starts(self, durations: Times, order: Ints) -> Times:
        """Return the earliest start time of each event; `order` must be topological."""
        if not len(order):
            return np.zeros(0)
        place = np.empty(self.num_events + 1, np.int64)
        place[order], place[NONE] = np.arange(self.num_events), NONE
        columns = [place[column[order]].tolist() for column in self._predecessors.columns]
        more = {place[event]: place[others].tolist() for event, others in self._predecessors.more.items()}
        starts: list[float] = []
        ends = [0.0] * (self.num_events + 1)  # the last entry: of the missing predecessor, `NONE`
        for event, (first, second, third, duration) in enumerate(zip(*columns, durations[order].tolist(), strict=True)):
            start, other = ends[first], ends[second]
            if other > start:
                start = other
            if third >= 0:
                start = max(start, ends[third], *(ends[other] for other in more.get(event, ())))
            starts.append(start)
            ends[event] = start + duration
        found = np.empty(self.num_events)
        found[order] = starts
        return found

    def in_order(self, times: Times, order: Ints) -> Ints:
        """Return a topological order of all events that is as close to `times` as may be; `order` is any such order."""
        place = np.empty(self.num_events, np.int64)
        place[order] = np.arange(self.num_events)
        raised: list[float] = times[order].tolist()
        by_place = np.argsort(place[self.targets], kind="stable")
        edges = zip(place[self.sources[by_place]].tolist(), place[self.targets[by_place]].tolist(), strict=True)
        for source, target in edges:
            if raised[source] > raised[target]:
                raised[target] = raised[source]
        return order[np.argsort(raised, kind="stable")]

    def latest(self, event: int, ends: Times, places: Ints) -> int:
        """Return the predecessor of an event that ended last, given all end times; `NONE` if it has none.

        Of several that ended together, the one with the largest entry in `places`.
        """
        waited = [int(column[event]) for column in self._predecessors.columns]
        waited = [other for other in (*waited, *self._predecessors.more.get(event, ())) if other != NONE]
        return max(waited, key=lambda other: (ends[other], places[other]), default=NONE)

    @cached_property
    def _predecessors(self) -> _Neighbours:
        return _Neighbours.from_edges(self.num_events, self.targets, self.sources)

    def cycle(self, waiting: Sequence[int]) -> list[tuple[int, int]]:
        """Return one cycle of events that never ran, as (event, rank on which the next one waits for it).

        The backward walk stays on one rank as long as it can, so that it reaches the instruction at which that rank is
        blocked, and only there crosses to the rank that it waits for.
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
    """Return a cycle as (event, later event, rank), with consecutive steps on one rank merged."""
    ranks = [rank for _, rank in cycle]
    starts = [k for k, rank in enumerate(ranks) if rank != ranks[k - 1]] or list(range(len(cycle)))
    return [
        (cycle[start][0], cycle[end][0], ranks[start])
        for start, end in zip(starts, [*starts[1:], starts[0]], strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Neighbours:
    """Adjacency by event: `columns[k][v]` is the k-th neighbour of event v, or `NONE`; `more` has the others.

    Duplicate edges may be merged.
    """

    columns: list[Ints]
    more: dict[int, list[int]]

    @classmethod
    def from_edges(cls, num_events: int, events: Ints, others: Ints) -> _Neighbours:
        """Group the edges by the event at one end, in the order given."""
        columns = []
        for _ in range(COLUMNS):
            column = np.full(num_events, NONE)
            column[events[::-1]] = others[::-1]
            columns.append(column)
            rest = column[events] != others
            events, others = events[rest], others[rest]
        more: dict[int, list[int]] = {}
        for event, other in zip(events.tolist(), others.tolist(), strict=True):
            more.setdefault(event, []).append(other)
        return cls(columns, more)
