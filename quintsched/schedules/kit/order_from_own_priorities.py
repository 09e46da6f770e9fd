"""List scheduling: each rank, whenever it is free, does what can run and comes first by a priority of yours.

    priority     backwards, then forwards, then weight halves, the oldest microbatch first
    memory cap   2 microbatches on rank 0, 1 on rank 1

    rank 0  F0 F1 .  I0 W0 F2 I1 W1 …      a forward begins only where the cap has room for it, and for all that the
    rank 1  .  F0 I0 W0 F1 I1 W1 …         oldest microbatch still needs: so no cap of one microbatch or more gets stuck

A run in simulated time, under the costs of the shape. Nobody waits for something better that is on its way: where that
pays, see the greedy search of `zb-auto` in `greedy_scheduling_by_costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from quintsched.errors import UsageError
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.schedules.kit.registry import Shape

Priority = Callable[[Compute], Any]
"""A computation → whatever sorts; the least goes first."""

Orders = tuple[tuple[Compute, ...], ...]
"""For each rank, its computations in order."""

Ways = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

WHOLE: tuple[type[Compute], ...] = (Fwd, Bwd)
"""`passes` of `list_schedule`: forwards and whole backwards."""
HALVES: tuple[type[Compute], ...] = (Fwd, BwdInput, BwdWeight)
"""`passes` of `list_schedule`: forwards and backwards in halves."""
PASSES = ((Fwd,), WHOLE, HALVES)
EPSILON = 1e-9


def backwards_first(computation: Compute) -> tuple[int, int, int]:
    """Return the usual priority: backwards, then forwards, then weight halves, the oldest microbatch first."""
    kind = 0 if isinstance(computation, Bwd | BwdInput) else 1 if isinstance(computation, Fwd) else 2
    return kind, computation.microbatch, computation.stage


def list_schedule(
    shape: Shape,
    priority: Priority = backwards_first,
    *,
    passes: tuple[type[Compute], ...] = WHOLE,
    memory_cap: float | Callable[[int], float] | None = None,
    routes: Iterable[tuple[Iterable[int], Iterable[int]]] | None = None,
) -> Orders:
    """Return the order of every rank, by a list schedule: `yield from list_schedule(shape)[rank]`.

    Args:
        shape: what the schedule is asked for; its costs say how long computations and messages take.
        priority: a computation → whatever sorts; of what can run, the least goes first. Asked once for each.
        passes: `WHOLE` backwards, their `HALVES`, or `(Fwd,)` alone.
        memory_cap: the most activations that a rank may hold, in microbatches of a whole rank: one number, or a
            function of the rank; None: any number.
        routes: (stages, microbatches) of each route, as for `@schedule`; None: all microbatches visit all stages.

    The latest results are remembered, by shape and priority: a function of a module, not a lambda made at each call.

    Raises:
        UsageError: a memory cap in which one microbatch has no room, or other passes.
    """
    if passes not in PASSES:
        raise UsageError("list_schedule: passes is none of WHOLE, HALVES and (Fwd,); import these from the kit")
    caps = tuple(memory_cap(rank) if callable(memory_cap) else memory_cap for rank in range(shape.pp))
    ways = ((range(len(shape.stage_to_pp)), range(shape.num_units)),) if routes is None else routes
    return _ordered(shape, priority, passes, caps, tuple((tuple(stages), tuple(units)) for stages, units in ways))


@lru_cache(maxsize=4)
def _ordered(
    shape: Shape, priority: Priority, passes: tuple[type[Compute], ...], caps: tuple[float | None, ...], ways: Ways
) -> Orders:
    run = _EventsToCome(_Work(shape, passes, ways), priority)
    ranks = [_RankProgress(rank, run.work, cap) for rank, cap in enumerate(caps)]
    while run.events:
        for rank in run.advance(ranks):
            ranks[rank].begin_first(run)
    return tuple(tuple(rank.order) for rank in ranks)


class _Work:
    """All computations, numbered: what each waits for, how long it takes, and what it holds."""

    def __init__(self, shape: Shape, passes: tuple[type[Compute], ...], ways: Ways) -> None:
        self.shape, self.passes = shape, passes
        self.num_stages, self.num_units = len(shape.stage_to_pp), shape.num_units
        shape.costs.check_fits(shape, self.num_stages, shape.pp)
        stages, units = np.indices((self.num_stages, self.num_units)).reshape(2, -1)
        parts = shape.chunks * shape.slices

        def costs(*names: str) -> list[float]:
            each = [shape.costs.of_units(name, stages, units, shape) for name in names]
            added: list[float] = np.add.reduce(each).tolist()
            return added

        self.durations = [time for kind in passes for time in costs(*kind.costs, *kind.exchanges)]
        self.after = [held / parts for held in costs("activation_after_input")]
        self.held = [max(both[0] / parts, both[1]) for both in zip(costs("activation"), self.after, strict=True)]
        self.waits = [0] * len(self.durations)
        self.next: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.visits = [(stage, unit) for stages, units in ways for unit in units for stage in stages]
        for way in ways:
            self._connect(*way, parts)

    def number(self, place: int, stage: int, unit: int) -> int:
        """Return the number of a computation; `place` is that of its kind among the passes."""
        return (place * self.num_stages + stage) * self.num_units + unit

    def computation(self, number: int) -> Compute:
        """Return the computation of a number."""
        rest, unit = divmod(number, self.num_units)
        place, stage = divmod(rest, self.num_stages)
        return self.passes[place](stage, unit)

    def _connect(self, stages: Sequence[int], units: Sequence[int], parts: int) -> None:
        """Say what the computations of a route wait for."""
        trains, slices = len(self.passes) > 1, self.shape.slices
        for one, other in pairwise(stages):
            for unit in units:
                self._wait(0, one, unit, 0, other, unit, self._message(one, one, other, unit) * parts)
                if trains:
                    self._wait(1, other, unit, 1, one, unit, self._message(one, other, one, unit) * parts)
        for stage in stages:
            for unit in units:
                for place in range(1, len(self.passes)):
                    self._wait(place - 1, stage, unit, place, stage, unit)
                if unit % slices:  # keys of the slices before, and their gradients on the way back
                    self._wait(0, stage, unit - 1, 0, stage, unit)
                    if trains:
                        self._wait(1, stage, unit, 1, stage, unit - 1)

    def _wait(self, place: int, stage: int, unit: int, then: int, at: int, of: int, message: float = 0.0) -> None:
        later = self.number(then, at, of)
        self.next[self.number(place, stage, unit)].append((later, message))
        self.waits[later] += 1

    def _message(self, named: int, source: int, destination: int, unit: int) -> float:
        """Return how long the output of stage `named`, or its gradient, is on its way between two stages."""
        sender, receiver = self.shape.stage_to_pp[source], self.shape.stage_to_pp[destination]
        if sender == receiver:
            return 0.0
        if self.shape.costs.message_time is not None:
            return self.shape.costs.message_time
        what, which, source_rank, rank = np.array([[named], [unit], [sender], [receiver]])
        return float(self.shape.costs.message_times(what, which, source_rank, rank, self.shape)[0])


class _EventsToCome:
    """The events to come: computations that end (on their rank), and those whose last input arrives."""

    def __init__(self, work: _Work, priority: Priority) -> None:
        self.work, self._priority, self.now = work, priority, 0.0
        self._waits = list(work.waits)
        self._arrivals = [0.0] * len(work.waits)
        firsts = (work.number(0, stage, unit) for stage, unit in work.visits)
        self.events = [(0.0, number, False) for number in firsts if not work.waits[number]]
        heapify(self.events)

    def advance(self, ranks: Sequence[_RankProgress]) -> list[int]:
        """Let the next moment come; return the ranks for which something has changed."""
        now, touched = self.events[0][0], set[int]()
        while self.events and self.events[0][0] <= now + EPSILON:
            _, number, ended = heappop(self.events)
            found = self.work.computation(number)
            rank = self.work.shape.stage_to_pp[found.stage]
            touched.add(rank)
            if ended:
                ranks[rank].end_computation(found)
                self._reach(number, now)
            else:
                ranks[rank].offer(found, (self._priority(found), number))
        self.now = now
        return sorted(touched)

    def begin_computation(self, number: int) -> None:
        """Begin a computation now."""
        heappush(self.events, (self.now + self.work.durations[number], number, True))

    def _reach(self, number: int, now: float) -> None:
        for later, message in self.work.next[number]:
            self._arrivals[later] = max(self._arrivals[later], now + message)
            self._waits[later] -= 1
            if not self._waits[later]:
                heappush(self.events, (self._arrivals[later], later, False))


class _RankProgress:
    """One rank as it runs: its order, what it could do, and what it holds of each microbatch."""

    def __init__(self, rank: int, work: _Work, cap: float | None) -> None:
        self.order: list[Compute] = []
        self._work, self._busy = work, False
        self._trains = len(work.passes) > 1
        self._cap = cap if self._trains else None
        self._forwards: list[tuple[Any, Compute]] = []
        self._of_microbatch: dict[int, list[tuple[Any, Compute]]] = defaultdict(list)
        self._others: list[tuple[Any, Compute]] = []
        self._begun: set[Compute] = set()
        self._held, self._total = defaultdict[int, float](float), 0.0
        self._needs, self._left = defaultdict[int, float](float), defaultdict[int, int](int)
        for stage, unit in work.visits:
            if work.shape.stage_to_pp[stage] == rank:
                self._needs[unit // work.shape.slices] += self._amount(work.held, stage, unit)
                self._left[unit // work.shape.slices] += 1
        self._most = max(self._needs.values(), default=0.0)
        self._in_order = iter(sorted(self._needs))
        self._oldest = next(self._in_order, -1)
        if self._cap is not None and self._cap + EPSILON < self._most:
            raise UsageError(
                f"list_schedule: memory_cap is {self._cap:g} on rank {rank}, where one microbatch holds "
                f"{self._most:g}; give at least {self._most:g}"
            )

    def offer(self, computation: Compute, place: Any) -> None:
        """Take note of a computation that can run; `place` is that in the list."""
        entry = (place, computation)
        if isinstance(computation, Fwd):
            heappush(self._forwards, entry)
            heappush(self._of_microbatch[self._microbatch(computation)], entry)
        else:
            heappush(self._others, entry)

    def begin_first(self, run: _EventsToCome) -> None:
        """Begin what comes first, if the rank is free and anything can run."""
        entries = [entry for entry in (self._next_forward(), *self._others[:1]) if entry is not None]
        if self._busy or not entries:
            return
        (_, number), found = min(entries, key=lambda entry: entry[0])
        if isinstance(found, Fwd):
            self._begun.add(found)
            self._hold(found, self._amount(self._work.held, found.stage, found.microbatch))
        else:
            heappop(self._others)
        self._busy = True
        self.order.append(found)
        run.begin_computation(number)

    def end_computation(self, computation: Compute) -> None:
        """Take note that a computation has ended."""
        self._busy = False
        held, after = (
            self._amount(amounts, computation.stage, computation.microbatch)
            for amounts in (self._work.held, self._work.after)
        )
        if isinstance(computation, BwdInput):
            self._hold(computation, after - held)
        elif isinstance(computation, Bwd | BwdWeight):
            self._hold(computation, -after if isinstance(computation, BwdWeight) else -held)
            self._left[self._microbatch(computation)] -= 1
            while self._oldest >= 0 and not self._left[self._oldest]:
                self._oldest = next(self._in_order, -1)

    def _next_forward(self) -> tuple[Any, Compute] | None:
        """Return the forward that comes first of those that have room; of the oldest microbatch, all have."""
        first = self._top(self._forwards)
        if first is None or self._has_room(first[1]):
            return first
        return self._top(self._of_microbatch[self._oldest])

    def _top(self, entries: list[tuple[Any, Compute]]) -> tuple[Any, Compute] | None:
        while entries and entries[0][1] in self._begun:
            heappop(entries)
        return entries[0] if entries else None

    def _has_room(self, forward: Compute) -> bool:
        if self._cap is None or self._microbatch(forward) == self._oldest:
            return True
        reserved = self._most - self._held[self._oldest]
        amount = self._amount(self._work.held, forward.stage, forward.microbatch)
        return self._total + amount + reserved <= self._cap + EPSILON

    def _hold(self, computation: Compute, amount: float) -> None:
        self._held[self._microbatch(computation)] += amount
        self._total += amount

    def _amount(self, amounts: Sequence[float], stage: int, unit: int) -> float:
        return amounts[stage * self._work.num_units + unit]

    def _microbatch(self, computation: Compute) -> int:
        return computation.microbatch // self._work.shape.slices
