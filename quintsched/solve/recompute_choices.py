"""Choices of what recomputes under a cap: stages, then shares of their microbatches, then single microbatches.

    stages    8 8 0 0            eighths of the microbatches of each stage: all or none
    shares    6 4 2 0            from falling and even ones on, one part of a stage more, or less
    6 of 8    R R K R R R K R …  evenly spread, so that a share of few microbatches is one of all
    single    R K K R R R K R    in short steps: one microbatch more, or less

Choices are compared by the time of few microbatches in list schedules, and those of equal time by their lower bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, product
from time import monotonic
from typing import Any, TypeVar

from quintsched.ir.layout import recomputed_units
from quintsched.simulation.costs import Costs
from quintsched.solve.list_policies import MANNERS, policies, schedule_by
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_timing import time_orders
from quintsched.solve.search_problem import NoRoomError, Problem, lower_bound, problem_of

SEARCHED, FINER, FEW = 2, 3, 3
"""Best choices of stages, and of microbatches, that are searched, and microbatches per rank of a trial."""
PARTS = 8
"""Parts of a stage's microbatches that shares count; in shorter steps, a part is one microbatch."""
WIDTHS, HEIGHTS = (0.25, 0.5, 0.75, 1.0), (0.5, 0.75, 1.0)
"""Shares to begin with: of the stages of a route, and of the microbatches of its first stage."""

Choice = tuple[tuple[bool, ...], ...]
"""Whether each stage recomputes each microbatch of its route."""
Shares = tuple[int, ...]
"""Parts of its microbatches that each stage recomputes."""
Value = tuple[float, float]
"""Time of a choice, and a lower bound on it."""
Point = TypeVar("Point", Choice, Shares)


def recompute_choices(
    problem: Problem, costs: Costs | None, objective: Objective, ends_s: float
) -> Iterator[tuple[Problem, Costs | None]]:
    """Yield a problem with other choices: all stages, and those with which few microbatches are fastest.

    Without a cap, there is nothing to gain. Trials end at `ends_s` (of `time.monotonic`).
    """
    if math.isinf(min(problem.caps)):
        return
    trials, stages, each = _Trials(problem, costs, objective, ends_s), problem.num_stages, problem.microbatches
    parts = min(PARTS, each)

    def value_of(shares: Shares) -> Value:
        return trials.value_of(_spread(shares, parts, each))

    def time_of(shares: Shares) -> float:
        return value_of(shares)[0]

    prefixes = ((parts,) * count + (0,) * (stages - count) for count in range(stages + 1))
    others = [partial(_with_share, stage, lambda share: parts - share) for stage in range(stages)]
    shares = _descend(min(prefixes, key=time_of), others, time_of)
    found = [*trials.best[:SEARCHED], ((True,) * each,) * stages]
    by_one = [lambda share: max(share - 1, 0), lambda share: min(share + 1, parts)]
    others = [partial(_with_share, stage, change) for stage, change in product(range(stages), by_one)]
    shares = _descend(min((shares, *_falling(problem, parts)), key=value_of), others, value_of)
    if trials.is_whole:
        single = [partial(_with_other, *cell) for cell in product(range(stages), range(each))]
        _descend(_spread(shares, parts, each), single, trials.value_of)
    kept = _choice_in(problem)
    for choice in dict.fromkeys((*found, *trials.front[:FINER])):
        with suppress(NoRoomError):
            if choice != kept:
                yield trials.problem_of(choice), costs


def _spread(shares: Shares, parts: int, each: int) -> Choice:
    """Return the choice in which each stage recomputes so many of `parts` microbatches, evenly spread."""
    return tuple(tuple(u * share // parts != (u + 1) * share // parts for u in range(each)) for share in shares)


def _choice_in(problem: Problem) -> Choice:
    """Return the choice of a problem."""
    stages, each = problem.num_stages, problem.microbatches
    again = recomputed_units(problem.recompute, problem.recompute_microbatches, stages, each * problem.routes, 1)
    return tuple(
        tuple(row[stage * problem.routes // stages * each :][:each]) for stage, row in enumerate(again.tolist())
    )


def _falling(problem: Problem, parts: int) -> Iterator[Shares]:
    """Yield even shares of the first stages of each route, and shares that fall from stage to stage."""
    way = problem.num_stages // problem.routes
    for width, height, falls in product(WIDTHS, HEIGHTS, (0, 1)):
        last = width * way
        heights = (height * (1 - falls * place / last) if place < last else 0.0 for place in range(way))
        yield tuple(round(parts * share) for share in heights) * problem.routes


def _with_share(stage: int, change: Callable[[int], int], shares: Shares) -> Shares:
    return (*shares[:stage], change(shares[stage]), *shares[stage + 1 :])


def _with_other(stage: int, microbatch: int, choice: Choice) -> Choice:
    row = choice[stage]
    other = (*row[:microbatch], not row[microbatch], *row[microbatch + 1 :])
    return (*choice[:stage], other, *choice[stage + 1 :])


def _descend(best: Point, others: Sequence[Callable[[Point], Point]], key: Callable[[Point], Any]) -> Point:
    """Return the point at which no other one is better."""
    before = None
    while best != before:
        before = best
        for other in others:
            best = min(best, other(best), key=key)
    return best


class _Trials:
    """Times of choices, with few microbatches; none is found any more after `ends_s`."""

    def __init__(self, problem: Problem, costs: Costs | None, objective: Objective, ends_s: float) -> None:
        self._problem, self._costs, self._objective, self._ends_s = problem, costs, objective, ends_s
        self._few = min(problem.microbatches, FEW * problem.pp)
        self._values = dict[Choice, Value]()
        self._least = math.inf

    @property
    def is_whole(self) -> bool:
        """Whether few microbatches are all."""
        return self._few == self._problem.microbatches

    @property
    def best(self) -> list[Choice]:
        """All choices, the best ones first."""
        return sorted(self._values, key=self._values.__getitem__)

    @property
    def front(self) -> list[Choice]:
        """The best choice, and then each one with a lower bound than all better ones: more search may pay there."""
        found, least = list[Choice](), math.inf
        for choice in self.best:
            if self._values[choice][1] < least:
                found, least = [*found, choice], self._values[choice][1]
        return found

    def value_of(self, choice: Choice) -> Value:
        """Return the time of a choice, and its bound; infinite where it has no room, or the time is over."""
        if choice not in self._values and monotonic() < self._ends_s:
            with suppress(NoRoomError):
                few = self.problem_of(choice).shortened(self._few)
                self._values[choice] = _value(few, self._objective, self._least)
                self._least = min(self._least, self._values[choice][0])
        return self._values.get(choice, (math.inf, math.inf))

    def problem_of(self, choice: Choice) -> Problem:
        """Return the problem of a choice; raises `NoRoomError`."""
        one, each, every = self._problem, self._problem.microbatches, range(self._problem.num_stages)
        first = [stage * one.routes // one.num_stages * each for stage in every]
        chosen = tuple(tuple(first[stage] + u for u in range(each) if choice[stage][u]) for stage in every)
        recompute, partly = [int(any(row)) for row in choice], any(0 < sum(row) < each for row in choice)
        sizes = one.pp, each * one.routes, one.stage_to_pp, self._costs, one.caps, one.routes
        return problem_of(*sizes, recompute=recompute, recompute_microbatches=chosen if partly else ())


def _value(problem: Problem, objective: Objective, best: float) -> Value:
    """Return the time of the best usual list schedule; only the bound on it where none can beat the best."""
    if (bound := lower_bound(problem, objective).value) >= best:
        return bound, bound
    orders = [schedule_by(problem, policy) for policy in islice(policies(problem, random.Random(0)), len(MANNERS))]
    timings = [time_orders(problem, problem.one_by_one), *(time_orders(problem, found) for found in orders if found)]
    return min(timing.value(objective) for timing in timings if timing), bound
