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

from quintsched.solve.order_annealing import random_jump
from quintsched.solve.order_problem import EPSILON
from quintsched.solve.periodic.periodic_orders import least_period, periodic_placements
from quintsched.solve.periodic.periodic_patterns import Pattern, Starts, unrolled
from quintsched.solve.search_problem import Problem

DOUBLINGS, LARGEST, REPEATS = 2, 1_600, 8
"""Times that the patterns of a round are doubled, most computations of one, and least times that a step repeats it."""
MOVES = 8_000
"""Moves of an annealing."""
HOT, COLD = (0.03, 0.1), 0.001
"""First temperatures, which take turns, and the last one, as shares of the time for one microbatch."""
SAME = 1e-6
"""Difference of times, as a share of a period, that counts as none."""
ANYWHERE = 0.15
"""Share of moves that are not on the circle that decides: they make room."""

Repeated = tuple[Starts, float]
"""Starts of a pattern's microbatches, and its period."""


class PatternAnnealing:
    """Annealing of the patterns of one problem, in rounds.

    Attributes:
        problem: the problem.
        firsts: starts from which each round begins.
        best: the pattern of the shortest period for a microbatch; nothing before the first round.
    """

    def __init__(
        self, problem: Problem, firsts: Sequence[Repeated], rng: random.Random, stops: Callable[[], bool]
    ) -> None:
        """Begin from known starts, and from those that fit if the kinds of a stage's computations are made alike."""
        self.problem, self.best = problem, list[Pattern]()
        self.firsts = [*firsts, *_placed_as_if_kinds_were_alike(problem, rng, stops)]

    def round(
        self, number: int, rng: random.Random, stops: Callable[[], bool], *, is_last: bool
    ) -> Iterator[list[list[int]]]:
        """Yield orders of annealed patterns, which grow; in the last round that of all, once more.

        Args:
            number: number of the round.
            rng: source of all decisions.
            stops: asked between moves whether to end.
            is_last: whether this is the last round.
        """
        problem, least = self.problem, least_period(self.problem) * (1 + EPSILON)
        if is_last:
            patterns, doublings = [_doubled(pattern) for pattern in self.best], 0
        else:
            patterns, doublings = [Pattern(problem, *one) for one in self.firsts], DOUBLINGS
        for pattern in _grown(patterns, doublings, rng, HOT[number % len(HOT)], stops):
            yield unrolled(problem, pattern.starts(math.ceil(problem.microbatches / pattern.length)))
            self.best = [min([pattern, *self.best], key=_period)]
            if stops() or _period(pattern) <= least:
                return


def _grown(
    patterns: list[Pattern], doublings: int, rng: random.Random, hot: float, stops: Callable[[], bool]
) -> Iterator[Pattern]:
    """Yield annealed patterns, and annealed ones of twice the length from the best of these, and so on."""
    for number in range(doublings + 1):
        if number:
            patterns = [_doubled(min(patterns, key=_period))]
        patterns = [pattern for pattern in patterns if _is_worth_annealing(pattern)]
        if not patterns:
            return
        patterns = [annealed(pattern, rng, hot, stops) for pattern in patterns]
        yield from patterns


def _is_worth_annealing(pattern: Pattern) -> bool:
    return len(pattern.turns) <= LARGEST and REPEATS * pattern.length <= pattern.problem.microbatches


def _doubled(pattern: Pattern) -> Pattern:
    return Pattern(pattern.problem, pattern.starts(2), 2 * pattern.period)


def _period(pattern: Pattern) -> float:
    """Return the period of one microbatch."""
    return pattern.period / pattern.length


def _placed_as_if_kinds_were_alike(
    problem: Problem, rng: random.Random, stops: Callable[[], bool]
) -> Sequence[Repeated]:
    """Return the best placement that is found as if the kinds of a stage's computations took equally long.

    It has fewer conflicts, and its order is a good one where they differ.
    """
    times, _ = problem.tables
    if not np.ptp(times, axis=0).any():
        return ()
    mean = tuple(np.broadcast_to(times.mean(axis=0), times.shape).flat)
    alike = replace(problem, durations=mean, leads=(0.0,) * len(mean))
    return [(one.starts_of(1), one.period) for one in list(periodic_placements(alike, rng, stops))[-1:]]


def repeated_part(problem: Problem, starts: Sequence[float]) -> list[Repeated]:
    """Return what repeats in the middle of a step, if anything does: starts of a few microbatches, and the period."""
    rows = np.reshape(starts, (-1, problem.microbatches))
    middle = problem.microbatches // 2
    for length in range(1, problem.microbatches // REPEATS + 1):
        few, next_few = (rows[:, first : first + length] for first in (middle, middle + length))
        period = float(next_few[0, 0] - few[0, 0])
        if np.allclose(next_few - few, period, rtol=0, atol=SAME * period):
            return [((few - few[0, 0]).tolist(), period)]
    return []


def annealed(pattern: Pattern, rng: random.Random, hot: float, stops: Callable[[], bool]) -> Pattern:
    """Return the pattern of the shortest period that moves from a pattern lead to, which they change."""
    period, shortest, starts = pattern.period, pattern.period, pattern.starts()
    for step in range(MOVES):
        if stops():
            break
        temperature = period / pattern.length * hot * (COLD / hot) ** (step / MOVES)
        most = period * (1 + EPSILON) - temperature * math.log(1 - rng.random())
        every = range(len(pattern.turns)) if rng.random() < ANYWHERE else pattern.circle
        if pattern.jump(every[rng.randrange(len(every))], random_jump(rng), most):
            period = pattern.period
            if period < shortest * (1 - EPSILON):
                shortest, starts = period, pattern.starts()
    return Pattern(pattern.problem, starts, shortest)
