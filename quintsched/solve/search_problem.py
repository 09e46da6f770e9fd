"""Problem of a search: that of a certificate, what a search reads from it, and its greatest lower bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from operator import add
from typing import get_args

from quintsched.errors import InputError, UsageError, counted
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd, Instruction
from quintsched.simulation.costs import Costs
from quintsched.solve.order_lower_bounds import Reason, bound_of
from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF, Chosen, Objective, StepProblem

KINDS: dict[type[Instruction], tuple[int, ...]] = {
    Fwd: (FORWARD,),
    BwdInput: (INPUT_HALF,),
    BwdWeight: (WEIGHT_HALF,),
    Bwd: (INPUT_HALF, WEIGHT_HALF),
}
"""Computations that an instruction stands for."""
ROUNDING = 1e-12

Orders = tuple[tuple[int, ...], ...]
"""For each rank, the numbers of its computations in order."""


@dataclass(frozen=True)
class Problem(StepProblem):
    """Computations of one step, with their ranks, their wires and what follows them.

    Attributes:
        recompute: for each stage, whether it recomputes; (): none does.
        recompute_microbatches: for each stage, the microbatches, as a plan counts them, for which it recomputes; ():
            for all, if it does.
        halves: problem with split backwards of which this one is, where its input halves stand for whole backwards;
            None: backwards are split here. Bounds are those of that problem.
    """

    recompute: tuple[int, ...] = ()
    recompute_microbatches: Chosen = ()
    halves: StepProblem | None = None

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of a computation."""
        return (kind * self.num_stages + stage) * self.microbatches + microbatch

    def place_of(self, number: int) -> tuple[int, int, int]:
        """Return kind, stage and microbatch (of its route) of a computation."""
        rest, microbatch = divmod(number, self.microbatches)
        return *divmod(rest, self.num_stages), microbatch

    def computation(self, number: int) -> Compute:
        """Return the instruction of a computation."""
        kind, stage, microbatch = self.place_of(number)
        route = stage * self.routes // self.num_stages
        return (Fwd, BwdInput, BwdWeight)[kind](stage, route * self.microbatches + microbatch)

    def numbers(self, program: Iterable[Instruction]) -> list[int]:
        """Return the computations that a rank's instructions stand for, in order."""
        return [
            self.number(kind, side.stage, side.microbatch % self.microbatches)
            for i in program
            for side in i.sides
            if isinstance(side, Compute)
            for kind in KINDS.get(type(side), ())
        ]

    def with_whole_backwards(self, costs: Costs) -> Problem:
        """Return the problem whose backwards are whole, which needs less memory where `grows`; `costs` are its own."""
        free = costs.model_copy(update={"activation_after_input": 0.0})
        sizes = self.pp, self.microbatches * self.routes, self.stage_to_pp, free, self.caps, self.routes
        other = Problem.of(*sizes, self.recompute, self.recompute_microbatches)
        each = len(self.durations) // 3
        forwards, inputs, weights = (self.durations[first : first + each] for first in range(0, 3 * each, each))
        return replace(
            other,
            durations=(*forwards, *map(add, inputs, weights), *(0.0,) * each),
            recompute=self.recompute,
            recompute_microbatches=self.recompute_microbatches,
            halves=self,
        )

    def rows(self, orders: Orders, *, whole: bool = False) -> tuple[tuple[Compute, ...], ...]:
        """Return the instructions of orders; `whole`: input halves stand for whole backwards, as they may anyway."""
        rows = tuple(tuple(map(self.computation, order)) for order in orders)
        if not whole and self.halves is None:
            return rows
        begun = (filter(lambda i: not isinstance(i, BwdWeight), row) for row in rows)
        return tuple(tuple(Bwd(i.stage, i.microbatch) if isinstance(i, BwdInput) else i for i in row) for row in begun)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each computation."""
        return tuple(self.stage_to_pp[self.place_of(number)[1]] for number in range(len(self.durations)))

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Computation that each one waits for (-1: none), beside the order of its rank.

        Forwards wait for that of the stage before, input halves for that of the stage after (the last of a route: for
        its forward), weight halves for their input half.
        """
        row, each = self.microbatches, self.num_stages * self.microbatches
        way = each // self.routes
        forwards = [number - row if number % way >= row else -1 for number in range(each)]
        halves = [each + number + row if number % way < way - row else number for number in range(each)]
        return (*forwards, *halves, *range(each, 2 * each))

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
    def one_by_one(self) -> Orders:
        """Orders that finish each microbatch before the next one begins: with the least memory."""
        length, orders = self.num_stages // self.routes, [list[int]() for _ in range(self.pp)]
        for microbatch, first in product(range(self.microbatches), range(0, self.num_stages, length)):
            stages = range(first, first + length)
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
    def are_alike(self) -> bool:
        """Whether all microbatches have the same times, messages and activations: then they may go in their order."""
        tables = (self.durations, self.lags, self.holds, self.rises, self.leads)
        return all(len(set(rows)) == 1 for table in tables for rows in _rows(table, self.microbatches))

    def peak(self, order: Sequence[int]) -> float:
        """Return the most activations that a rank holds in an order of its computations."""
        held, peak, holds, rises = 0.0, 0.0, self.holds, self.rises
        for number in order:
            if held + rises[number] > peak:
                peak = held + rises[number]
            held += holds[number]
        return peak

    def shortened(self, microbatches: int) -> Problem:
        """Return the problem with the first of its microbatches only."""

        def first(table: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value for row in _rows(table, self.microbatches) for value in row[:microbatches])

        return replace(
            self,
            microbatches=microbatches,
            durations=first(self.durations),
            lags=first(self.lags),
            holds=first(self.holds),
            rises=first(self.rises),
            leads=first(self.leads),
        )


def _rows(table: Sequence[float], length: int) -> list[Sequence[float]]:
    return [table[first : first + length] for first in range(0, len(table), length)]


def problem_of(
    pp: int,
    microbatches: int,
    stage_to_pp: Sequence[int],
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    routes: int = 1,
    recompute: Sequence[int] = (),
    recompute_microbatches: Chosen = (),
    *,
    whole: bool = False,
) -> Problem:
    """Return the problem of these sizes and costs, as `StepProblem.of`; `whole`: with whole backwards.

    Raises:
        NoRoomError: a cap in which one microbatch has no room.
        InputError: costs or `recompute` of other numbers of stages, microbatches or ranks.
    """
    if len(recompute) not in (0, len(stage_to_pp)):
        values = counted(len(recompute), "value")
        raise InputError(f"recompute has {values}, but there are {len(stage_to_pp)} stages")
    sizes, choice = (pp, microbatches, stage_to_pp), (tuple(recompute), recompute_microbatches)
    problem = Problem.of(*sizes, costs, memory_cap, routes, *choice)
    if any(recompute):
        problem = replace(problem, recompute=choice[0], recompute_microbatches=recompute_microbatches)
    problem = problem.with_whole_backwards(costs or Costs()) if whole else problem
    _require_room(problem)
    return problem


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
    needs = [problem.peak(order) for order in problem.one_by_one]
    for rank in sorted(range(problem.pp), key=needs.__getitem__, reverse=True):
        if not problem.caps[rank] * (1 + EPSILON) >= needs[rank]:
            raise NoRoomError(rank, problem.caps[rank], needs[rank])


@dataclass(frozen=True)
class Bound:
    """Lower bound on an objective: by which rank, and for which reason."""

    value: float
    rank: int
    reason: Reason


def lower_bound(problem: StepProblem, objective: Objective) -> Bound:
    """Return the greatest of all bounds."""
    found = [
        Bound(bound_of(getattr(problem, "halves", None) or problem, objective, rank, reason), rank, reason)
        for rank in range(problem.pp)
        for reason in get_args(Reason)
    ]
    return max(found, key=lambda bound: bound.value)
