"""Orders that repeat: every microbatch runs as the one before it, a period later; a rank's period is a circle of time.

    rank 0   ▕ F  .  I  W ▏ F  .  I  W ▏        period T: the computations of one microbatch on a rank, mod T, do not
    rank 1   ▕ W  F  I  . ▏ W  F  I  . ▏        overlap, and it waits as little as they allow

For a period, each computation is put at the first free place after its input has come (modulo scheduling; Rau 1994).
With one stage on a rank, no other way holds activations for a shorter time. The shortest period whose activations keep
to the caps is unrolled: many microbatches take hardly longer than their number times the period.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from quintsched.solve.order_bounds import bound_of
from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF
from quintsched.solve.order_timing import has_room
from quintsched.solve.search_problem import Problem

FINEST, MOST_SLACK, PERIODS = 2e-4, 0.4, 400
"""Steps of the period, as a share of it; the most that it may exceed its bound by; and how many periods are tried."""
ORDERS = 3
"""Orders that are unrolled: of the shortest periods that keep to the caps."""


def periodic_orders(problem: Problem) -> Iterator[list[list[int]]]:
    """Yield orders that repeat and keep to the caps, the shortest period first; none for microbatches that differ."""
    if not problem.are_alike or problem.microbatches < 2:
        return
    least, found = least_period(problem), 0
    period, last = least * (1 + EPSILON), least * (1 + MOST_SLACK)
    step = max(FINEST, MOST_SLACK / PERIODS / 4)
    while period <= last and found < ORDERS:
        starts = _placed(problem, period)
        if starts is not None and _keeps_to_caps(problem, starts, period):
            orders = unrolled(problem, starts, period)
            if all(has_room(problem, rank, order) for rank, order in enumerate(orders)):
                yield orders
                found += 1
        period, step = period * (1 + step), step * 1.01


def least_period(problem: Problem) -> float:
    """Return the least time per microbatch: that of the busiest rank, or of the one with the least memory."""
    each = [max(bound_of(problem, "span", rank, "memory"), problem.work[rank]) for rank in range(problem.pp)]
    return max(each) / problem.microbatches


@dataclass
class _Circle:
    """Period of a rank, with the places in it that are taken: (start, end), sorted; none goes over its end."""

    period: float
    taken: list[tuple[float, float]] = field(default_factory=list)

    def first_free(self, earliest: float, duration: float) -> float | None:
        """Return the first time from `earliest` on at which so long a computation does not overlap; None: never."""
        if duration <= 0:
            return earliest
        time, most = earliest, earliest + 2 * self.period
        while time < most:
            place = time % self.period
            end = self._end_of_conflict(place, duration)
            if end is None:
                return time
            time += end - place if end > place else end - place + self.period
        return None

    def _end_of_conflict(self, place: float, duration: float) -> float | None:
        """Return the end of a taken place that overlaps, on the circle; None if there is none."""
        slack = self.period * EPSILON
        for start, end in self.taken:
            for turn in (-self.period, 0.0, self.period):
                if place + duration > start + turn + slack and place < end + turn - slack:
                    return end + turn
        return None if duration <= self.period + slack else place + 3 * self.period

    def take(self, time: float, duration: float) -> None:
        """Take a place."""
        place = time % self.period
        if duration > 0:
            self.taken.append((place, place + duration))


def _placed(problem: Problem, period: float) -> list[float] | None:
    """Return the start of each computation of the first microbatch, by kind and stage; None if the period is too short.

    An input half waits until there is also a place for its weight half.
    """
    stages = problem.num_stages
    circles = [_Circle(period) for _ in range(problem.pp)]
    starts = [0.0] * (3 * stages)

    def first(kind: int, stage: int) -> tuple[int, float]:
        number = problem.number(kind, stage, 0)
        return number, problem.durations[number]

    ready = 0.0
    for stage in range(stages):
        number, duration = first(FORWARD, stage)
        found = circles[problem.stage_to_pp[stage]].first_free(ready + problem.lags[number], duration)
        if found is None:
            return None
        circles[problem.stage_to_pp[stage]].take(found, duration)
        starts[stage], ready = found, found + duration
    for stage in reversed(range(stages)):
        circle = circles[problem.stage_to_pp[stage]]
        (number, duration), (_, weight) = first(INPUT_HALF, stage), first(WEIGHT_HALF, stage)
        begin = circle.first_free(ready + problem.lags[number], duration)
        after = None
        for _ in range(2 * len(circle.taken) + 2):
            if begin is None:
                return None
            circle.take(begin, duration)
            after = circle.first_free(begin + duration, weight)
            if after is not None:
                break
            circle.taken.pop()
            begin = _later(circle, begin, duration, weight)
        if begin is None or after is None:
            return None
        circle.take(after, weight)
        starts[INPUT_HALF * stages + stage], starts[WEIGHT_HALF * stages + stage] = begin, after
        ready = begin + duration
    return starts


def _later(circle: _Circle, begin: float, duration: float, weight: float) -> float | None:
    """Return the next time for an input half at which a gap before it, or after it, has room for the weight half."""
    place = begin % circle.period
    ends = sorted(
        {(end + weight) % circle.period for _, end in circle.taken} | {end % circle.period for _, end in circle.taken}
    )
    starts = {(start - duration) % circle.period for start, _ in circle.taken}
    ahead = [(end - place) % circle.period or circle.period for end in (*ends, *starts)]
    for distance in sorted(ahead):
        if distance > circle.period * EPSILON and circle.first_free(begin + distance, duration) == begin + distance:
            return begin + distance
    return None


def _keeps_to_caps(problem: Problem, starts: list[float], period: float) -> bool:
    """Return whether the activations of all microbatches together keep to the caps, wherever a forward begins."""
    stages = problem.num_stages
    for rank, cap in enumerate(problem.caps):
        mine = [stage for stage, where in enumerate(problem.stage_to_pp) if where == rank]
        held = []
        for stage in mine:
            weight = problem.number(WEIGHT_HALF, stage, 0)
            end = starts[WEIGHT_HALF * stages + stage] + problem.durations[weight]
            held.append((starts[stage], end, problem.reserved[problem.number(FORWARD, stage, 0)]))
        for begin, _, _ in held:
            total = 0.0
            for start, end, amount in held:
                total += amount * (
                    math.floor((begin - start) / period + EPSILON) - math.floor((begin - end) / period + EPSILON)
                )
            if total > cap * (1 + EPSILON):
                return False
    return True


def unrolled(problem: Problem, starts: list[float], period: float) -> list[list[int]]:
    """Return the orders of all microbatches; `starts` has the computations of the first one, by kind and stage."""
    stages, orders = problem.num_stages, [list[tuple[float, int]]() for _ in range(problem.pp)]
    for row, start in enumerate(starts):
        rank = problem.stage_to_pp[row % stages]
        first = row * problem.microbatches
        orders[rank] += [(start + turn * period, first + turn) for turn in range(problem.microbatches)]
    return [[number for _, number in sorted(order)] for order in orders]
