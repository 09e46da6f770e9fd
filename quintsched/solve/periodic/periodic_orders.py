"""Orders that repeat: every microbatch runs as the one before it, a period later; a rank's period is a circle of time.

    rank 0   ▕ F  .  I  W ▏ F  .  I  W ▏        period T: the computations of one microbatch on a rank, mod T, do not
    rank 1   ▕ W  F  I  . ▏ W  F  I  . ▏        overlap, and it waits as little as they allow

For a period, `periodic_placing` looks for places (modulo scheduling; Rau 1994). Short periods are tried first, with few
attempts each; then shorter ones than the best that was found, with more. Placements are unrolled: many microbatches
take hardly longer than their number times the period.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quintsched.solve.order_lower_bounds import bound_of
from quintsched.solve.order_problem import EPSILON
from quintsched.solve.order_timing import has_room
from quintsched.solve.periodic.periodic_patterns import Starts, unrolled
from quintsched.solve.periodic.periodic_placing import PeriodPlacing
from quintsched.solve.search_problem import Problem

FACTORS = (1 + EPSILON, 1.001, 1.003, 1.006, 1.01, 1.015, 1.02, 1.03, 1.04, 1.06, 1.08, 1.1, 1.15, 1.2, 1.3, 1.4)
"""Periods that are tried, as multiples of the least one."""
STRIDE, QUICK, THOROUGH, MISSES = 3, 3, 12, 2
"""Every so many periods, from the shortest on, so many placements are tried, until one keeps to the caps. Then so many
are tried for each shorter period, from the longest of them on, until so many periods have missed."""
NOISE = 0.2
"""Most by which random numbers raise the score of a partial placement, as a share of it."""


@dataclass(frozen=True)
class PeriodicStarts:
    """Starts of the first microbatch's computations, by kind and stage, which are the next one's a period later."""

    period: float
    starts: list[float]

    def starts_of(self, microbatches: int) -> Starts:
        """Return the starts of so many microbatches."""
        return [[start + turn * self.period for turn in range(microbatches)] for start in self.starts]


def periodic_placements(
    problem: Problem, rng: random.Random, stops: Callable[[], bool] = lambda: False
) -> Iterator[PeriodicStarts]:
    """Yield placements that keep to the caps, each of a shorter period; none for microbatches that differ
    or take no time.

    Args:
        problem: the problem.
        rng: source of the random part of scores.
        stops: asked between placements whether to end.
    """
    least, found, misses = least_period(problem), 0, 0
    if not problem.are_alike or problem.microbatches < 2 or least <= 0:
        return
    for place in range(0, len(FACTORS), STRIDE):
        placement = _placed(problem, least * FACTORS[place], rng, QUICK, stops)
        if placement is not None:
            yield placement
            found = place
            break
    for place in reversed(range(found)):
        if misses == MISSES:
            return
        placement = _placed(problem, least * FACTORS[place], rng, THOROUGH, stops)
        if placement is not None:
            yield placement
        misses = 0 if placement else misses + 1


def _placed(
    problem: Problem, period: float, rng: random.Random, attempts: int, stops: Callable[[], bool]
) -> PeriodicStarts | None:
    """Return a placement for a period; None if none was found."""
    placing = PeriodPlacing(problem, period)
    for number in range(attempts):
        if stops():
            return None
        starts = placing.place(rng, NOISE if number else 0.0)
        if starts is None:
            continue
        placement = PeriodicStarts(period, starts)
        orders = unrolled(problem, placement.starts_of(problem.microbatches))
        if all(has_room(problem, rank, order) for rank, order in enumerate(orders)):
            return placement
    return None


def least_period(problem: Problem) -> float:
    """Return the least time per microbatch: that of the busiest rank, or of the one with the least memory."""
    each = [max(bound_of(problem, "span", rank, "memory"), problem.work[rank]) for rank in range(problem.pp)]
    return float(max(each)) / problem.microbatches
