"""Lower bounds on the time of any order, rank by rank: each follows from a few sums, which `certify` adds up again.

    work      a rank computes for this long
    fill      until the first gradient comes back to a rank it can only run forwards, as many as its cap has room for:
              the rest of that time it is idle. From the start of its last forward to that microbatch's weight half it
              can only run backwards, as many as its cap has held: the rest of that time it is idle, too. And each
              microbatch has its way from the rank's first stage to the end of the model, and back
    memory    each microbatch's activations are held for at least the time of its way to the end of the model and back
              (what is recomputed: for that of its backward); the cap times the span is at least the sum of these, and
              what stays free of the cap at both ends: in time for i forwards no more than i begin, and in time for i
              weight halves no more than i end

A makespan is at least the time until a rank's first input has come, plus that rank's span. After a rank's last input
half, its gradient has the way to the first stage ahead, while the rank can only run weight halves; so a makespan is
also at least the time until that half, plus this way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from quintsched.ir.instruction_columns import Amounts
from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF, Objective, StepProblem

Reason = Literal["work", "fill", "memory"]


def bound_of(problem: StepProblem, objective: Objective, rank: int, reason: Reason) -> float:
    """Return the lower bound that one rank gives for one reason."""
    if problem.grows:
        problem = replace(problem, caps=(math.inf,) * problem.pp)
    span = problem.work[rank]
    if reason != "work":
        span = _fill(problem, rank) if reason == "fill" else _memory(problem, rank)
    if objective == "span":
        return span
    weight_halves = float(problem.tables[0][WEIGHT_HALF, _stages(problem, rank)].sum())
    rest = 0.0 if reason == "memory" else tail(problem, rank) - weight_halves
    return head(problem, rank) + span + max(0.0, rest)


def head(problem: StepProblem, rank: int) -> float:
    """Return the least time until the first input of a rank comes."""
    way_out = problem.way_out
    return min(float((way_out[begin] - way_out[first]).min()) for begin, first, _ in _ways(problem, rank))


def tail(problem: StepProblem, rank: int) -> float:
    """Return the least time from the end of a rank's last input half to that of the microbatch's last computation."""
    times, way_back, found = problem.tables[0], problem.way_back, list[float]()
    for begin, first, _ in _ways(problem, rank):
        way = way_back[begin] - way_back[first] + times[INPUT_HALF, begin] - times[INPUT_HALF, first]
        found.append(float((way + times[WEIGHT_HALF, begin]).min()))
    return min(found)


def _ways(problem: StepProblem, rank: int) -> list[tuple[int, int, int]]:
    """Return for each route through a rank its first stage, and the rank's first and last stage on it."""
    way, stages = problem.num_stages // problem.routes, _stages(problem, rank)
    by_route = [[stage for stage in stages if stage // way == route] for route in range(problem.routes)]
    return [(route * way, mine[0], mine[-1]) for route, mine in enumerate(by_route) if mine]


def _stages(problem: StepProblem, rank: int) -> list[int]:
    return [stage for stage, where in enumerate(problem.stage_to_pp) if where == rank]


def _fill(problem: StepProblem, rank: int) -> float:
    """Work and the idle time before the first gradient and after the last forward began, or the way of a microbatch.

    Both idle times are apart where not all forwards fit into the cap: then the last one waits for a gradient.
    """
    stages, (times, _) = _stages(problem, rank), problem.tables
    ways, out, back = _ways(problem, rank), problem.way_out, problem.way_back
    starts, _, rest = _shares(problem, rank, problem.holds)
    forward, both = times[FORWARD, stages], times[INPUT_HALF, stages] + times[WEIGHT_HALF, stages]
    wait = min(float((out[first] + back[last]).min()) for _, first, last in ways)
    idle = max(0.0, wait - _most_work(forward, starts))
    if starts.sum() > 1 + EPSILON:
        way = out[stages] + back[stages] + both - forward
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            held = np.minimum(starts, np.where(both > 0, both * -rest / times[WEIGHT_HALF, stages], 0.0))
        idle += max(0.0, float(way.min()) - _most_work(both, np.nan_to_num(held)))
    firsts = [first for _, first, _ in ways]
    there_and_back = out[firsts] + back[firsts] + (times[INPUT_HALF, firsts] + times[WEIGHT_HALF, firsts])
    return max(problem.work[rank] + idle, float(there_and_back.max()))


def _shares(problem: StepProblem, rank: int, amounts: Sequence[float]) -> Amounts:
    """Return activations of a rank's stages as shares of its cap, (kinds, stages, microbatches).

    Their sums stay finite for any cap. Where the cap is 0, all activations are 0.
    """
    cap = problem.caps[rank]
    each = np.reshape(amounts, (-1, problem.num_stages, problem.microbatches))
    return each[:, _stages(problem, rank)] / (cap if cap > 0 else 1.0)


def _most_work(works: Amounts, holds: Amounts) -> float:
    """Return the most work, in parts too, that holds no more than a cap: by work for what is held, as a share of it."""
    free, paid = holds <= 0, holds > 0
    best_first = np.argsort(-works[paid] / holds[paid], kind="stable")
    work, held = works[paid][best_first], holds[paid][best_first]
    parts = np.clip((1.0 - (np.cumsum(held) - held)) / held, 0.0, 1.0)
    return float(works[free].sum() + parts @ work)


def _memory(problem: StepProblem, rank: int) -> float:
    if problem.caps[rank] in (0.0, math.inf):
        return 0.0
    stages, (times, _) = _stages(problem, rank), problem.tables
    holds = _shares(problem, rank, problem.holds)
    until_half = problem.way_out[stages] + problem.way_back[stages]
    after_half = until_half + times[INPUT_HALF, stages]
    area = -holds[INPUT_HALF] * np.where(holds[INPUT_HALF] > 0, until_half, after_half)
    area -= holds[WEIGHT_HALF] * (after_half + times[WEIGHT_HALF, stages])
    rises = _shares(problem, rank, problem.rises)[INPUT_HALF]
    area += (rises - np.maximum(holds[INPUT_HALF], 0.0)) * times[INPUT_HALF, stages]
    return float(area.sum()) + _free_at_ends(problem, rank, float(area.sum()))


def _free_at_ends(problem: StepProblem, rank: int, area: float) -> float:
    """Return the least time of a whole cap that is free at both ends of a span, in which `area` of it is held.

    Its i-th forward begins after i - 1 others, and its i-th last weight half ends before i - 1 others.
    """
    stages, (times, _) = _stages(problem, rank), problem.tables
    most = float(_shares(problem, rank, problem.reserved)[FORWARD].max())
    if not 0 < most < 1:
        return 0.0
    free = np.maximum(1 - most * np.arange(1, len(stages) * problem.microbatches + 1), 0.0)
    begin, end = (float(times[kind, stages].min()) for kind in (FORWARD, WEIGHT_HALF))
    # In a shorter span, the same memory may be free at both ends.
    apart = area >= np.count_nonzero(free) * (begin + end)
    return float(free.sum()) * (begin + end if apart else max(begin, end))
