"""Problem of a solver: computations of a step with their times, messages and activations, on ranks with a memory cap.

Every backward is split: its weight half may directly follow its input half, and then takes as long as a whole one. A
computation is a number, `(kind * num_stages + stage) * microbatches + microbatch`, with the kinds forward, input half
and weight half. All times are in the unit of the costs, all activations in microbatches of a whole rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from quintsched.errors import UsageError, counted
from quintsched.ir.instruction_columns import Amounts, Ints
from quintsched.ir.instruction_set import BwdInput, BwdWeight, Compute, Fwd
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.simulation.costs import Costs

FORWARD, INPUT_HALF, WEIGHT_HALF = range(3)
KINDS: tuple[type[Compute], ...] = (Fwd, BwdInput, BwdWeight)
EPSILON = 1e-9
"""Difference that counts as none between numbers of units, and between activations as a share of the cap."""
ROUNDING = 1e-12

Objective = Literal["span", "makespan"]
"""Time that is minimised: the longest span of a rank, from its first forward to its last weight half, or the makespan,
from the first computation of any rank to the last."""

Orders = tuple[tuple[int, ...], ...]
"""For each rank, the numbers of its computations in order."""


@dataclass(frozen=True)
class Problem:
    """Computations of one step, numbered; each attribute but the first three has one entry per computation.

    Attributes:
        pp, microbatches, stage_to_pp: sizes, and the pipeline rank of each stage.
        durations: time of each computation.
        needs: the computation that another one waits for (-1: none), beside the order of its rank: forwards wait for
            that of the stage before, input halves for that of the stage after (the last stage: for its forward),
            weight halves for their input half.
        lags: time of the message from `needs`. The messages from one rank to another go one after the other, in the
            order in which they are needed.
        holds: activations that begin to be held when a computation starts (a forward; an input half after which more
            is held than before), or that are freed when it ends (negative: the halves of a backward).
        caps: most activations of each rank; infinity: any number.
    """

    pp: int
    microbatches: int
    stage_to_pp: tuple[int, ...]
    durations: tuple[float, ...]
    needs: tuple[int, ...]
    lags: tuple[float, ...]
    holds: tuple[float, ...]
    caps: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_to_pp)

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of a computation."""
        return (kind * self.num_stages + stage) * self.microbatches + microbatch

    def place_of(self, number: int) -> tuple[int, int, int]:
        """Return kind, stage and microbatch of a computation."""
        rest, microbatch = divmod(number, self.microbatches)
        return *divmod(rest, self.num_stages), microbatch

    def computation(self, number: int) -> Compute:
        """Return the instruction of a computation."""
        kind, stage, microbatch = self.place_of(number)
        return KINDS[kind](stage, microbatch)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each computation."""
        return tuple(self.stage_to_pp[self.place_of(number)[1]] for number in range(len(self.durations)))

    @cached_property
    def wires(self) -> tuple[int, ...]:
        """Wire of the message that each computation waits for (-1: none, or one on which messages take no time)."""
        pairs = [
            self.ranks[needed] * self.pp + rank if needed >= 0 and self.ranks[needed] != rank else -1
            for needed, rank in zip(self.needs, self.ranks, strict=True)
        ]
        timed = {pair for pair, lag in zip(pairs, self.lags, strict=True) if lag}
        return tuple(pair if pair in timed else -1 for pair in pairs)

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """Computations that wait for each one."""
        found: list[list[int]] = [[] for _ in self.durations]
        for number, needed in enumerate(self.needs):
            if needed >= 0:
                found[needed].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def reserved(self) -> tuple[float, ...]:
        """Activations as in `holds`, but with what an input half adds held from its forward on."""
        each = self.num_stages * self.microbatches
        forwards, halves, rest = (self.holds[first : first + each] for first in range(0, 3 * each, each))
        added = [max(half, 0.0) for half in halves]
        return (*map(float.__add__, forwards, added), *(min(half, 0.0) for half in halves), *rest)

    @cached_property
    def one_by_one(self) -> Orders:
        """Orders that finish each microbatch before the next one begins: with the least memory."""
        stages, orders = range(self.num_stages), [list[int]() for _ in range(self.pp)]
        for microbatch in range(self.microbatches):
            ways = ((FORWARD,), stages), ((INPUT_HALF, WEIGHT_HALF), reversed(stages))
            for kinds, way in ways:
                for stage in way:
                    orders[self.stage_to_pp[stage]] += [self.number(kind, stage, microbatch) for kind in kinds]
        return tuple(map(tuple, orders))

    @cached_property
    def tick(self) -> float:
        """Difference of times that counts as none: rounding errors stay far below it."""
        return ROUNDING * math.fsum((*self.durations, *self.lags))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        found = [0.0] * self.pp
        for number, duration in enumerate(self.durations):
            found[self.ranks[number]] += duration
        return tuple(found)

    @cached_property
    def tables(self) -> tuple[Amounts, Amounts]:
        """Times and messages of computations, each (kinds, stages, microbatches)."""
        shape = (len(KINDS), self.num_stages, self.microbatches)
        return np.reshape(self.durations, shape), np.reshape(self.lags, shape)

    @cached_property
    def way_out(self) -> Amounts:
        """Least time from the start of each forward to the end of the last stage's, (stages, microbatches)."""
        times, lags = self.tables
        sent = np.concatenate((lags[FORWARD, 1:], np.zeros((1, self.microbatches))))
        return np.cumsum((times[FORWARD] + sent)[::-1], axis=0)[::-1]

    @cached_property
    def way_back(self) -> Amounts:
        """Least time from the end of the last stage's forward to the start of each input half, of the same shape."""
        times, lags = self.tables
        after = np.zeros_like(times[INPUT_HALF])
        after[:-1] = times[INPUT_HALF, 1:] + lags[INPUT_HALF, :-1]
        return np.cumsum(after[::-1], axis=0)[::-1]

    @cached_property
    def are_alike(self) -> bool:
        """Whether all microbatches have the same times, messages and activations: then they may go in their order."""
        tables = (self.durations, self.lags, self.holds)
        return all(len(set(rows)) == 1 for table in tables for rows in _rows(table, self.microbatches))

    def shortened(self, microbatches: int) -> Problem:
        """Return the problem with the first of its microbatches only."""

        def first(table: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value for row in _rows(table, self.microbatches) for value in row[:microbatches])

        return replace(
            self,
            microbatches=microbatches,
            needs=tuple(_needs(self.num_stages, microbatches)),
            durations=first(self.durations),
            lags=first(self.lags),
            holds=first(self.holds),
        )


def _rows(table: Sequence[float], length: int) -> list[Sequence[float]]:
    return [table[first : first + length] for first in range(0, len(table), length)]


def problem_of(
    pp: int,
    microbatches: int,
    stage_to_pp: Sequence[int],
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
) -> Problem:
    """Return the problem of these sizes and costs.

    Args:
        pp: number of pipeline ranks.
        microbatches: number of microbatches.
        stage_to_pp: the pipeline rank of each stage; every rank has as many.
        costs: times, messages and activations; None: unit costs.
        memory_cap: most activations that a rank holds, in microbatches of a whole rank: one number, or one per rank.

    Raises:
        NoRoomError: a cap in which one microbatch has no room.
        InputError: costs of other numbers of stages, microbatches or ranks.
    """
    costs, stages = costs or Costs(), len(stage_to_pp)
    counts = ScheduleSpec("", microbatches, stages // pp)
    costs.check_fits(counts, stages, pp)
    every, units = np.indices((stages, microbatches)).reshape(2, -1)

    def of(*names: str) -> list[float]:
        added: Amounts = np.add.reduce([costs.of_units(name, every, units, counts) for name in names]) / counts.chunks
        return [float(one) for one in added]

    after = of("activation_after_input")
    held = of("activation")
    holds = [*held, *(left - most for left, most in zip(after, held, strict=True)), *(-left for left in after)]
    passes = (("forward", "exchange"), ("backward_input", "exchange_backward"), ("backward_weight",))
    problem = Problem(
        pp=pp,
        microbatches=microbatches,
        stage_to_pp=tuple(stage_to_pp),
        durations=tuple(time for names in passes for time in of(*names)),
        needs=tuple(_needs(stages, microbatches)),
        lags=tuple(_lags(costs, np.array(stage_to_pp), every, units, counts)),
        holds=tuple(holds),
        caps=_caps(pp, memory_cap),
    )
    _require_room(problem)
    return problem


def _needs(stages: int, microbatches: int) -> list[int]:
    each, last = stages * microbatches, (stages - 1) * microbatches
    forwards = [number - microbatches if number >= microbatches else -1 for number in range(each)]
    halves = [each + number + microbatches if number < last else number for number in range(each)]
    return [*forwards, *halves, *range(each, 2 * each)]


def _lags(costs: Costs, ranks: Ints, every: Ints, units: Ints, counts: ScheduleSpec) -> list[float]:
    stages = len(ranks)

    def messages(named: Ints, source: Ints, target: Ints) -> list[float]:
        sends = (source >= 0) & (target >= 0) & (source < stages) & (target < stages)
        ends = ranks[np.where(sends, source, 0)], ranks[np.where(sends, target, 0)]
        times = costs.message_times(np.where(sends, named, 0), units, *ends, counts)
        return list(np.where(sends & (ends[0] != ends[1]), times, 0.0))

    forwards = messages(every - 1, every - 1, every)
    return [*map(float, forwards), *map(float, messages(every, every + 1, every)), *([0.0] * len(forwards))]


def _caps(pp: int, memory_cap: float | Sequence[float] | None) -> tuple[float, ...]:
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * pp
    if len(caps) != pp:
        raise UsageError(
            f"memory_cap has {counted(len(caps), 'value')}; give one, or one for each of the "
            f"{counted(pp, 'pipeline rank')}"
        )
    return tuple(math.inf if cap is None else float(cap) for cap in caps)


class NoRoomError(UsageError):
    """Memory cap in which one microbatch has no room, with the `smallest` that works on the rank that needs most."""

    def __init__(self, rank: int, cap: float, smallest: float) -> None:
        self.smallest = smallest
        super().__init__(
            f"the memory cap of rank {rank} is {cap:.10g}, but one microbatch holds {smallest:.10g}; the smallest that "
            f"works: {smallest:.10g}"
        )


def _require_room(problem: Problem) -> None:
    """Raise `NoRoomError` for a cap in which a microbatch has no room: one at a time, any larger works."""
    needs = [max(accumulate(problem.holds[number] for number in order)) for order in problem.one_by_one]
    for rank in sorted(range(problem.pp), key=needs.__getitem__, reverse=True):
        if not problem.caps[rank] * (1 + EPSILON) >= needs[rank]:
            raise NoRoomError(rank, problem.caps[rank], needs[rank])
