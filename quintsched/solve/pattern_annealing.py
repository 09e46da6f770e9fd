"""Simulated annealing of patterns that repeat: computations on the circle of waits that decides move within a rank.

A pattern of one microbatch has few orders. The best one that is found is repeated in a pattern of two, in which two
microbatches may run unlike each other, and so on: with little memory, longer patterns have shorter periods. A pattern
is as long to time as it is, however many microbatches the step has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from quintsched.solve.local_search import random_jump
from quintsched.solve.order_problem import EPSILON
from quintsched.solve.periodic_orders import Placement, least_period, periodic_placements
from quintsched.solve.periodic_patterns import Pattern, unrolled
from quintsched.solve.search_problem import Problem

LENGTHS, LARGEST = (1, 2, 4, 8), 1_600
"""Microbatches of patterns, and most computations of one."""
HOT, COLD = 0.03, 0.001
"""First and last temperature, as shares of the time for one microbatch."""
ANYWHERE = 0.15
"""Share of moves that are not on the circle that decides: they make room."""


def annealed_periods(
    problem: Problem, placement: Placement | None, rng: random.Random, moves: int, stops: Callable[[], bool]
) -> Iterator[list[list[int]]]:
    """Yield orders that repeat, each of a shorter period.

    Args:
        problem: the problem.
        placement: the best one that is known for it.
        rng: source of all decisions.
        moves: moves of the annealing of each length.
        stops: asked between moves whether to end.
    """
    placements = [*filter(None, [placement]), *_placements_of_alike_kinds(problem, rng, stops)]
    patterns = [Pattern(problem, one.starts_of(1), one.period) for one in placements]
    for length in LENGTHS:
        if not patterns or len(patterns[0].turns) * length > LARGEST:
            return
        if length > 1:
            best = min(patterns, key=lambda pattern: pattern.period)
            patterns = [Pattern(problem, best.starts(2), 2 * best.period)]
        patterns = [annealed(pattern, rng, moves, stops) for pattern in patterns]
        for pattern in patterns:
            yield unrolled(problem, pattern.starts(math.ceil(problem.microbatches / length)))
            if stops() or pattern.period <= length * least_period(problem) * (1 + EPSILON):
                return


def _placements_of_alike_kinds(problem: Problem, rng: random.Random, stops: Callable[[], bool]) -> Sequence[Placement]:
    """Return the best placement that is found as if the kinds of a stage's computations took equally long.

    It has fewer conflicts, and its order is a good one where they differ.
    """
    times, _ = problem.tables
    if not np.ptp(times, axis=0).any():
        return ()
    alike = replace(problem, durations=tuple(np.broadcast_to(times.mean(axis=0), times.shape).flat))
    return tuple(periodic_placements(alike, rng, stops))[-1:]


def annealed(pattern: Pattern, rng: random.Random, moves: int, stops: Callable[[], bool]) -> Pattern:
    """Return the pattern of the shortest period that moves from a pattern lead to, which they change."""
    period, shortest, starts = pattern.period, pattern.period, pattern.starts()
    for step in range(moves):
        if stops():
            break
        temperature = period / pattern.length * HOT * (COLD / HOT) ** (step / moves)
        most = period * (1 + EPSILON) - temperature * math.log(1 - rng.random())
        every = range(len(pattern.turns)) if rng.random() < ANYWHERE else pattern.circle
        if pattern.jump(every[rng.randrange(len(every))], random_jump(rng), most):
            period = pattern.period
            if period < shortest * (1 - EPSILON):
                shortest, starts = period, pattern.starts()
    return Pattern(pattern.problem, starts, shortest)
