"""List scheduling under a cap: a rank that is free starts the best computation that can run and has room.

A `Policy` has a rank of its own for each kind of computation, so that ranks may differ, and a share of their caps that
ranks leave free: less memory on one rank may shorten the whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF
from quintsched.solve.search_problem import Problem

USUAL = (0.5, 0.0, 0.7)
"""Priorities of forwards, input halves and weight halves: the least goes first."""
MANNERS = (USUAL, (0.7, 0.0, 0.5), (0.7, 0.5, 0.0), (0.5, 0.7, 0.0), (0.0, 0.5, 0.7))


@dataclass(frozen=True)
class Policy:
    """Priorities of a rank's stages by kind, what later microbatches add, and the share of each cap that is used."""

    priorities: tuple[tuple[float, float, float], ...]
    age: float
    caps: tuple[float, ...]


def policies(problem: Problem, rng: random.Random) -> Iterator[Policy]:
    """Yield policies without end: the usual ones, and then random ones."""
    stages = problem.num_stages
    largest = np.reshape(problem.holds, problem.tables[0].shape)[FORWARD].max(axis=1)
    microbatch = [float(largest[np.equal(problem.stage_to_pp, rank)].sum()) for rank in range(problem.pp)]
    for age in (0.0, 0.02, 1.0):
        for manner in MANNERS:
            yield Policy((manner,) * stages, age, problem.caps)
    while True:
        manner, spread = rng.choice(MANNERS), rng.choice((0.1, 0.3, 1.0))
        rows = tuple(tuple(value + spread * rng.random() for value in manner) for _ in range(stages))
        lower = rng.random() < 0.5
        caps = tuple(
            cap - rng.choice((0, 0, 0, 1, 1, 2)) * whole if lower else cap
            for cap, whole in zip(problem.caps, microbatch, strict=True)
        )
        yield Policy(rows, rng.choice((0.0, 0.0, 0.02, 0.1, 1.0)), caps)  # type: ignore[arg-type]


def schedule_by(problem: Problem, policy: Policy) -> list[list[int]] | None:
    """Return the orders that a policy leads to; None if ranks run out of memory."""
    run = _PolicyRun(problem, policy)
    while run.events:
        now, rank = heappop(run.events)
        if run.free[rank] <= now + problem.tick:
            run.start_best(rank, now)
    return run.orders if run.left == 0 else None


class _PolicyRun:
    """State of a simulated run."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        self.orders: list[list[int]] = [[] for _ in range(problem.pp)]
        self.free = [0.0] * problem.pp
        self.left = len(problem.durations)
        self.events = [(0.0, rank) for rank in range(problem.pp)]
        heapify(self.events)
        self._held, self._added = [0.0] * problem.pp, [0.0] * problem.pp
        """Activations that each rank holds, and those of them that input halves have added."""
        self._begun: list[list[int]] = [[] for _ in range(problem.pp)]
        """Forwards of each rank whose backward has not begun."""
        self._wires = dict[int, float]()
        stages, microbatches = problem.num_stages, problem.microbatches
        self._coming: list[list[tuple[float, int]]] = [[] for _ in range(3 * stages)]
        """Computations of each kind and stage whose input is on its way or here, by microbatch: (arrival, number)."""
        self._at = [0] * (3 * stages)
        for number, needed in enumerate(problem.needs[: stages * microbatches]):
            if needed < 0:
                self._coming[number // microbatches].append((0.0, number))
        self._stages_of = [
            [stage for stage in range(stages) if problem.stage_to_pp[stage] == rank] for rank in range(problem.pp)
        ]
        self._rows = [[kind * stages + stage for stage in mine for kind in range(3)] for mine in self._stages_of]
        each = stages * microbatches
        added = [max(half, 0.0) for half in problem.holds[each : 2 * each]]
        self._grows = [*([0.0] * each), *added, *(-one for one in added)]
        rises = np.reshape(problem.rises, (3, stages, -1))[INPUT_HALF]
        self._most = [float(rises[mine].max()) for mine in self._stages_of]
        """Most that an input half adds on each rank, for which forwards leave room."""

    def start_best(self, rank: int, now: float) -> None:
        """Start the computation that comes first of those that can run."""
        stages, policy, best, chosen = self.problem.num_stages, self.policy, 0.0, -1
        for row in self._rows[rank]:
            place, coming = self._at[row], self._coming[row]
            if place >= len(coming) or coming[place][0] > now + self.problem.tick:
                continue
            kind, stage = divmod(row, stages)
            if kind != WEIGHT_HALF and not self._has_room(rank, coming[place][1], kind):
                continue
            merit = policy.priorities[stage][kind] + policy.age * place
            if chosen < 0 or merit < best:
                best, chosen = merit, row
        if chosen >= 0:
            self._start(rank, chosen, now)

    def _has_room(self, rank: int, number: int, kind: int) -> bool:
        """Return whether an input half has room, or a forward beside what the oldest microbatch will still need."""
        problem, stages = self.problem, self.problem.num_stages
        if kind == INPUT_HALF:
            rises, most = problem.rises[number], problem.caps[rank] * (1 + EPSILON)
            return not rises or self._held[rank] + rises <= most
        after = self._held_after(rank, number) / (1 + EPSILON)
        if after > self.policy.caps[rank] and self._held[rank] > 0:
            return False
        mine = self._stages_of[rank]
        oldest = min(self._at[WEIGHT_HALF * stages + stage] for stage in mine)
        microbatch = number % problem.microbatches
        if microbatch <= oldest or len(mine) == 1:
            return after <= problem.caps[rank]
        needed = sum(
            problem.holds[problem.number(FORWARD, stage, oldest)] for stage in mine if self._at[stage] <= oldest
        )
        return after + needed <= max(self.policy.caps[rank], 0.0)

    def _held_after(self, rank: int, number: int) -> float:
        """Return what a rank holds after a forward, with the room that an input half needs later on.

        A rank of one stage that recomputes some microbatches runs them backward in the order of their forwards: an
        input half then needs room beside the later ones only.
        """
        problem = self.problem
        if len(self._stages_of[rank]) > 1 or not problem.recompute_microbatches:
            room = max(self._most[rank] - self._added[rank], 0.0)
            return self._held[rank] + problem.holds[number] + room
        most, later = self._held[rank] + problem.holds[number], 0.0
        for forward in (number, *reversed(self._begun[rank])):
            later += problem.holds[forward]
            most = max(most, later + problem.rises[forward + INPUT_HALF * problem.num_stages * problem.microbatches])
        return most

    def _start(self, rank: int, row: int, now: float) -> None:
        problem = self.problem
        number = self._coming[row][self._at[row]][1]
        self._at[row] += 1
        end = now + problem.durations[number]
        self.free[rank] = end
        self.orders[rank].append(number)
        self._held[rank] += problem.holds[number]
        self._added[rank] += self._grows[number]
        kind = row // problem.num_stages
        if kind == FORWARD:
            self._begun[rank].append(number)
        elif kind == INPUT_HALF:
            self._begun[rank].remove(number - problem.num_stages * problem.microbatches)
        self.left -= 1
        heappush(self.events, (end, rank))
        for later in problem.followers[number]:
            other, wire, arrival = problem.ranks[later], problem.wires[later], end
            if wire >= 0:
                arrival = self._wires[wire] = max(end, self._wires.get(wire, 0.0)) + problem.lags[later]
            arrival = max(arrival - problem.leads[later], now)
            if other != rank:
                heappush(self.events, (arrival, other))
            self._coming[later // problem.microbatches].append((arrival, later))
