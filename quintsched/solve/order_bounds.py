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

import numpy as np

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
    return float((problem.way_out[0] - problem.way_out[first]).min())


def tail(problem: Problem, rank: int) -> float:
    """Return the least time from the end of a rank's last input half to that of the microbatch's last computation."""
    first, (times, _) = problem.stage_to_pp.index(rank), problem.tables
    way = problem.way_back[0] - problem.way_back[first] + times[INPUT_HALF, 0] - times[INPUT_HALF, first]
    return float((way + times[WEIGHT_HALF, 0]).min())


def _weight_halves(problem: Problem, rank: int) -> float:
    return math.fsum(problem.tables[0][WEIGHT_HALF, _stages(problem, rank)].flat)


def _stages(problem: Problem, rank: int) -> list[int]:
    return [stage for stage, where in enumerate(problem.stage_to_pp) if where == rank]


def _work(problem: Problem, rank: int) -> float:
    return problem.work[rank]


def _fill(problem: Problem, rank: int) -> float:
    """Work and the idle time before the first gradient: forwards in it are bounded by a fractional knapsack."""
    stages = _stages(problem, rank)
    wait = float((problem.way_out[stages[0]] + problem.way_back[stages[-1]]).min())
    forwards = [
        problem.number(FORWARD, stage, microbatch) for stage in stages for microbatch in range(problem.microbatches)
    ]
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
    stages, (times, _) = _stages(problem, rank), problem.tables
    holds = np.reshape(problem.holds, times.shape)[:, stages]
    until_half = problem.way_out[stages] + problem.way_back[stages]
    after_half = until_half + times[INPUT_HALF, stages]
    area = -holds[INPUT_HALF] * np.where(holds[INPUT_HALF] > 0, until_half, after_half)
    area -= holds[WEIGHT_HALF] * (after_half + times[WEIGHT_HALF, stages])
    return float(area.sum()) / problem.caps[rank]


_REASONS: dict[Reason, Callable[[Problem, int], float]] = {"work": _work, "fill": _fill, "memory": _memory}
