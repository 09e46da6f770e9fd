"""Idle time: how long each rank does nothing, by cause, and for whom it waits.

    rank 0  [F0][F1]..........[B0]      the gap ends when B0 can begin: the chain of events without slack behind it
    rank 1      [F0][ B0 ]~~╱           leads to B0 of rank 1, for which rank 0 waits

The page of a plan (`viz/page/idle_reasons.js`) explains gaps by the same rules, and takes the causes from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quintsched.graph.event_graph import Times
from quintsched.graph.events_and_channels import NO_GROUP, Events
from quintsched.ir.instruction_columns import ABSENT, Ints
from quintsched.ir.instruction_set import AMONG_REPLICAS, BEGINS_BACKWARD, COMPUTING, Fwd, HostCopy, Message, Overlap
from quintsched.simulation.held_activations import ROUNDING, HeldActivations, held_activations
from quintsched.simulation.instruction_durations import event_durations
from quintsched.simulation.simulator import Simulation, timed_graph

CAUSES = {
    "warm-up": "the pipeline is filling: the first microbatches have not come through yet",
    "cool-down": "the pipeline is draining: no forward is left that could fill the gap",
    "imbalance": "another stage takes longer than this one",
    "message": "the time is spent on the wire",
    "order": "work was ready here, but the order runs it later",
    "cap": "work was ready here, but its activations would go over the cap",
    "collective": "all ranks of a group have to meet",
}
"""Causes of idle time, with what each means."""

MOST_EXPLAINED = 50_000
"""Most instructions of a plan whose gaps are all explained without being asked for."""
_MOST_LATER = 64
"""Computations behind a gap that are tried: was one ready?"""


@dataclass(frozen=True)
class IdleInterval:
    """Interval in which a rank runs nothing that takes time, before row `row`; None: until the end of the step."""

    rank: int
    start: float
    end: float
    before: int | None
    row: int | None


@dataclass(frozen=True)
class WhyIdle:
    """Explanation of a gap: one of `CAUSES`, and the ranks whose computations it waits for; () for its own work."""

    gap: IdleInterval
    cause: str
    ranks: tuple[int, ...]


class IdleTime:
    """Idle time of a simulated plan; with a memory cap, in microbatches of a whole rank, it may be a cause."""

    def __init__(self, simulation: Simulation, memory_cap: float | None = None) -> None:
        self._run, self._plan, self._cap = simulation, simulation.plan, memory_cap
        self._columns = simulation.plan.columns
        self._events = Events.merge(simulation.plan)
        timed = timed_graph(simulation.plan, self._events, simulation.costs)
        self._starts, ends = timed.times()
        self._ends = ends[: timed.num_events]
        self._durations = event_durations(simulation.plan, self._events, simulation.costs)
        self._slack = simulation.makespan * self._plan.schedule.parts * ROUNDING
        whole = timed.graph.targets < timed.num_events
        self._before = _grouped(timed.graph.targets[whole], timed.of[timed.graph.sources[whole]], timed.num_events)
        self._rows = _grouped(self._events.of, np.arange(len(self._columns)), timed.num_events)
        self._is_message, self._is_computing = self._columns.are(Message), self._columns.are(*COMPUTING)
        self._meets = (self._events.groups != NO_GROUP) | self._columns.are(*AMONG_REPLICAS)

    def of_ranks(self) -> tuple[tuple[WhyIdle, ...], ...]:
        """Explain all gaps of each rank, in order."""
        return tuple(tuple(map(self.explain, self.gaps(rank))) for rank in range(self._columns.num_ranks))

    def gaps(self, rank: int) -> Iterator[IdleInterval]:
        """Yield the gaps of a rank, in order."""
        rows, run, least = np.array(self._columns.rows_of(rank)), self._run, self._run.makespan * ROUNDING
        takes_time = ~self._is_message[rows] & ~self._columns.are(HostCopy)[rows] & (run.end[rows] > run.start[rows])
        rows = rows[takes_time]
        rows = rows[np.argsort(run.start[rows], kind="stable")]
        until, last = 0.0, None
        for row, start, end in zip(rows.tolist(), run.start[rows].tolist(), run.end[rows].tolist(), strict=True):
            if start > until + least:
                yield IdleInterval(rank, until, start, last, row)
            if end > until:
                until, last = end, row
        if run.makespan > until + least:
            yield IdleInterval(rank, until, run.makespan, last, None)

    def explain(self, gap: IdleInterval) -> WhyIdle:
        """Explain a gap."""
        if gap.row is None:
            last = int(self._ends.argmax())
            cause = "collective" if self._is_collective(last) else "cool-down"
            return WhyIdle(gap, cause, tuple(sorted(self._ranks_of(last) - {gap.rank})))
        culprits, messages, meets = self._behind(int(self._events.of[gap.row]), gap.rank)
        cause = self._cause(gap, gap.row, culprits, messages, meets=meets)
        return WhyIdle(gap, cause, tuple(sorted({rank for event in culprits for rank in self._ranks_of(event)})))

    def _behind(self, target: int, rank: int) -> tuple[set[int], set[int], bool]:
        """Walk back through all chains without slack.

        Returns the first computations of other ranks on them, the messages before which none of these is, and whether
        a collective is among them.
        """
        culprits, last, meets = set[int](), set[int](), self._is_collective(target)

        def is_culprit(event: int) -> bool:
            found = not self._is_message[self._first(event)] and rank not in self._ranks_of(event)
            if found:
                culprits.add(event)
            return found

        def is_last(event: int) -> bool:
            found = bool(self._is_message[self._first(event)]) or rank not in self._ranks_of(event)
            if found:
                last.add(event)
            return found

        for stops in (is_culprit, is_last):
            meets = self._walk(target, stops) or meets
        return culprits, {event for event in last if self._is_message[self._first(event)]}, meets

    def _walk(self, target: int, stops: Callable[[int], bool]) -> bool:
        """Go back until events that take time and stop a chain; return whether a collective was seen."""
        seen, stack, meets = {target}, [target], False
        while stack:
            for event in self._tight(stack.pop()):
                if event in seen:
                    continue
                seen.add(event)
                takes_time = self._durations[event] > 0
                meets = meets or (takes_time and self._is_collective(event))
                if not (takes_time and stops(event)):
                    stack.append(event)
        return meets

    def _tight(self, event: int) -> Iterable[int]:
        """Return the events before this one that end exactly when it begins."""
        begins = self._starts[event] - self._slack
        return (other for other in self._before(event) if self._ends[other] >= begins)

    def _cause(self, gap: IdleInterval, row: int, culprits: set[int], messages: set[int], *, meets: bool) -> str:
        if meets and not self._is_computing[row]:
            return "collective"
        half = (gap.end - gap.start) * self._plan.schedule.parts / 2
        if any(self._durations[event] >= half for event in messages):
            return "message"
        backward, forward = self._phases[gap.rank]
        if row <= backward or row > forward:
            return "warm-up" if row <= backward else "cool-down"
        ready = self._ready(gap, row)
        if ready is not None:
            return "cap" if self._is_over_cap(gap, ready) else "order"
        mine = self._durations[self._events.of[gap.before]] if gap.before is not None else 0.0
        if any(self._durations[event] > mine + self._slack for event in culprits):
            return "imbalance"
        return "message" if messages else "imbalance"

    @cached_property
    def _phases(self) -> tuple[tuple[int, int], ...]:
        """The row of each rank's first backward, and of its last forward."""
        columns, found = self._columns, []
        begins, forwards = columns.are(*BEGINS_BACKWARD, Overlap), columns.are(Fwd, Overlap)
        for rank in range(columns.num_ranks):
            rows = np.array(columns.rows_of(rank))
            backward, forward = rows[begins[rows]], rows[forwards[rows]]
            found.append((int(backward.min(initial=len(columns))), int(forward.max(initial=ABSENT))))
        return tuple(found)

    def _ready(self, gap: IdleInterval, row: int) -> int | None:
        """Return a later computation of the rank whose inputs were there early in the gap, if there is one."""
        if not self._is_computing[row]:
            return None
        later = np.arange(row + 1, self._columns.rows_of(gap.rank).stop)
        later = later[self._is_computing[later]][:_MOST_LATER]
        ready = later[self._inputs_at[later] <= (gap.start + gap.end) / 2]
        return int(ready[0]) if len(ready) else None

    @cached_property
    def _inputs_at(self) -> Times:
        """Times at which everything that each row takes is there."""
        flows, found = self._plan.flows, np.zeros(len(self._columns))
        for uses in (flows.consumes, flows.reads):
            makers = flows.first_makers[uses.places]
            known = makers != ABSENT
            np.maximum.at(found, uses.rows[known], self._run.end[makers[known]])
        return found

    def _is_over_cap(self, gap: IdleInterval, row: int) -> bool:
        """Whether a forward in this gap would hold more than the cap until its own place comes."""
        if self._cap is None or not self._columns.are(Fwd)[row]:
            return False
        held, own = self._held[gap.rank], self._plan.programs[gap.rank][self._columns.place(row)[1]]
        until = (*held.times[1:], np.inf)
        most = max(
            (
                amount
                for begins, ends, amount in zip(held.times, until, held.amounts, strict=True)
                if begins < self._run.start[row] and ends > gap.start
            ),
            default=0.0,
        )
        assert isinstance(own, Fwd)
        spec = self._plan.schedule
        size = self._run.costs.of_units("activation", np.array([own.stage]), np.array([own.microbatch]), spec)
        return bool(most + size[0] / spec.parts > self._cap + ROUNDING)

    @cached_property
    def _held(self) -> tuple[HeldActivations, ...]:
        return held_activations(self._run, self._run.costs)

    def _first(self, event: int) -> int:
        return int(self._events.first_rows[event])

    def _ranks_of(self, event: int) -> set[int]:
        return set(self._columns.rank[self._rows(event)].tolist())

    def _is_collective(self, event: int) -> bool:
        return bool(self._meets[self._first(event)])


def _grouped(keys: Ints, values: Ints, count: int) -> Callable[[int], Ints]:
    """Return a function that gives the values of each key, in order."""
    order = np.argsort(keys, kind="stable")
    starts, values = np.searchsorted(keys[order], np.arange(count + 1)), values[order]
    return lambda key: values[starts[key] : starts[key + 1]]


@dataclass(frozen=True)
class TimeOfRank:
    """Time of a rank until the makespan, by what it goes to.

    `parts` has, by name, the times of computing, of exchanges inside stages that computing does not hide, of other
    instructions that occupy the rank, and idle time by cause; only those above 0. `waits` has the ranks it waits for,
    with how long; a gap with several is divided equally among them.
    """

    rank: int
    parts: Mapping[str, float]
    waits: Mapping[int, float]


COMPUTING_TIME, EXCHANGES, OTHERS = "computing", "exchange", "other"


def times_of_ranks(simulation: Simulation, memory_cap: float | None = None) -> tuple[TimeOfRank, ...]:
    """Return where the time of each rank goes."""
    found, least = [], simulation.makespan * ROUNDING
    busy = zip(simulation.busy, simulation.exchange, strict=True)
    for rank, (gaps, (computing, exchange)) in enumerate(
        zip(IdleTime(simulation, memory_cap).of_ranks(), busy, strict=True)
    ):
        parts = {COMPUTING_TIME: computing - exchange, EXCHANGES: exchange, OTHERS: 0.0, **dict.fromkeys(CAUSES, 0.0)}
        waits: dict[int, float] = {}
        for why in gaps:
            length = why.gap.end - why.gap.start
            parts[why.cause] += length
            for other in why.ranks:
                waits[other] = waits.get(other, 0.0) + length / len(why.ranks)
        parts[OTHERS] = simulation.makespan - sum(parts.values())
        longest = sorted(waits.items(), key=lambda one: -one[1])
        found.append(TimeOfRank(rank, {name: time for name, time in parts.items() if time > least}, dict(longest)))
    return tuple(found)
