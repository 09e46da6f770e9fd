"""Lower bounds on the time of any order, rank by rank: each follows from a few sums, which `certify` adds up again.

    work      a rank computes for this long
    fill      until the first gradient comes back to a rank it can only run forwards, as many as its cap has room for:
              the rest of that time it is idle
    memory    each microbatch's activations are held for at least the time of its way to the end of the model and back;
              the cap times the span is at least the sum of these

A makespan is at least the time until a rank's first input has come, plus that rank's span. After a rank's last input
half, its gradient has the way to the first stage ahead, while the rank can only run weight halves; so a makespan is
also at least the time until that half, plus this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from quintsched.solve.order_problem import FORWARD, INPUT_HALF, WEIGHT_HALF, Problem
from quintsched.solve.order_timing import Objective

Reason = Literal["work", "fill", "memory"]


@dataclass(frozen=True)
class Bound:
    """Lower bound on an objective: by which rank, and for which reason."""

    value: float
    rank: int
    reason: Reason


def lower_bound(problem: Problem, objective: Objective) -> Bound:
    """Return the greatest of all bounds."""
    found = [
        Bound(bound_of(problem, objective, rank, reason), rank, reason)
        for rank in range(problem.pp)
        for reason in get_args(Reason)
    ]
    return max(found, key=lambda bound: bound.value)


def bound_of(problem: Problem, objective: Objective, rank: int, reason: Reason) -> float:
    """Return the lower bound that one rank gives for one reason."""
    span = _REASONS[reason](problem, rank)
    if objective == "span":
        return span
    first = head(problem, rank)
    rest = 0.0 if reason == "memory" else tail(problem, rank) - _weight_halves(problem, rank)
    return first + span + max(0.0, rest)


def head(problem: Problem, rank: int) -> float:
    """Return the least time until the first input of a rank comes."""
    first = problem.stage_to_pp.index(rank)
    return min(_between(problem, microbatch, 0, first) for microbatch in range(problem.microbatches))


def tail(problem: Problem, rank: int) -> float:
    """Return the least time from the end of a rank's last input half to that of the microbatch's last computation."""
    first = problem.stage_to_pp.index(rank)
    return min(_way_back(problem, microbatch, first) for microbatch in range(problem.microbatches))


def _way_back(problem: Problem, microbatch: int, first: int) -> float:
    """Return the time from the end of the input half of stage `first` to the end of stage 0's weight half."""
    total = problem.durations[problem.number(WEIGHT_HALF, 0, microbatch)]
    for stage in range(first):
        half = problem.number(INPUT_HALF, stage, microbatch)
        total += problem.durations[half] + problem.lags[half]
    return total


def _weight_halves(problem: Problem, rank: int) -> float:
    each = (n for n in range(problem.number(WEIGHT_HALF, 0, 0), len(problem.durations)) if problem.ranks[n] == rank)
    return math.fsum(problem.durations[number] for number in each)


def _between(problem: Problem, microbatch: int, first: int, last: int) -> float:
    """Return the time from the start of a microbatch's forward of one stage to that of a later one, at the least."""
    total = 0.0
    for stage in range(first, last):
        total += problem.durations[problem.number(FORWARD, stage, microbatch)]
        total += problem.lags[problem.number(FORWARD, stage + 1, microbatch)]
    return total


def round_trip(problem: Problem, microbatch: int, out: int, back: int) -> float:
    """Return the least time from the start of a forward of stage `out` to that of the input half of stage `back`."""
    last = problem.num_stages - 1
    total = _between(problem, microbatch, out, last)
    total += problem.durations[problem.number(FORWARD, last, microbatch)]
    for stage in range(last, back, -1):
        total += problem.durations[problem.number(INPUT_HALF, stage, microbatch)]
        total += problem.lags[problem.number(INPUT_HALF, stage - 1, microbatch)]
    return total


def _work(problem: Problem, rank: int) -> float:
    return problem.work[rank]


def _fill(problem: Problem, rank: int) -> float:
    """Work and the idle time before the first gradient: forwards in it are bounded by a fractional knapsack."""
    stages = [stage for stage, where in enumerate(problem.stage_to_pp) if where == rank]
    everything = range(problem.microbatches)
    wait = min(round_trip(problem, microbatch, stages[0], stages[-1]) for microbatch in everything)
    forwards = [problem.number(FORWARD, stage, microbatch) for stage in stages for microbatch in everything]
    room, fits = problem.caps[rank], 0.0
    free = [number for number in forwards if problem.holds[number] <= 0]
    fits += math.fsum(problem.durations[number] for number in free)
    paid = [number for number in forwards if problem.holds[number] > 0]
    for number in sorted(paid, key=lambda number: -problem.durations[number] / problem.holds[number]):
        share = min(1.0, room / problem.holds[number])
        if share <= 0:
            break
        fits += share * problem.durations[number]
        room -= share * problem.holds[number]
    return problem.work[rank] + max(0.0, wait - fits)


def _memory(problem: Problem, rank: int) -> float:
    if problem.caps[rank] in (0.0, math.inf):
        return 0.0
    area = 0.0
    for stage, where in enumerate(problem.stage_to_pp):
        for microbatch in range(problem.microbatches) if where == rank else ():
            half = problem.number(INPUT_HALF, stage, microbatch)
            weight = problem.number(WEIGHT_HALF, stage, microbatch)
            until_half = round_trip(problem, microbatch, stage, stage)
            after_half = until_half + problem.durations[half]
            area -= problem.holds[half] * (until_half if problem.holds[half] > 0 else after_half)
            area -= problem.holds[weight] * (after_half + problem.durations[weight])
    return area / problem.caps[rank]


_REASONS: dict[Reason, Callable[[Problem, int], float]] = {"work": _work, "fill": _fill, "memory": _memory}
