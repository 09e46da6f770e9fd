"""Orders that repeat, by constraint programming: for several stages on a rank, where the first free place is not best.

A computation starts at `period * turn + place`; places on a rank do not overlap, also across the end of the period. A
stage holds as many microbatches as its activations live periods, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quintsched.solve.constraint_programming import import_or_tools, new_solver, solve_model
from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF
from quintsched.solve.order_timing import has_room
from quintsched.solve.periodic_orders import least_period, unrolled
from quintsched.solve.search_problem import Problem

FACTORS = (1.007, 1.012, 1.025, 1.05, 1.1)
"""Periods that are tried, as multiples of the least one: shorter ones take much longer to find."""
RESOLUTION = 3_000
"""Units of a period."""
MOST_TURNS = 4
"""Most periods that a microbatch is on its way, as a multiple of the stages."""
CAP_UNITS = 100_000


def solved_periodic_order(
    problem: Problem, *, seed: int, effort: float, ends: Callable[[], float], stops: Callable[[], bool]
) -> tuple[list[list[int]] | None, bool]:
    """Return an order of a short period that keeps to the caps (None: none was found), and whether Ctrl-C came.

    Args:
        problem: the problem.
        seed: of CP-SAT.
        effort: work for each period, in CP-SAT's deterministic seconds.
        ends: returns the seconds that are left.
        stops: asked between periods whether to end.
    """
    if not problem.are_alike:
        return None, False
    for factor in FACTORS:
        if stops():
            break
        period = least_period(problem) * factor
        starts, is_interrupted = _solved(problem, period, seed, effort, ends())
        if starts is not None:
            orders = unrolled(problem, starts, period)
            if all(has_room(problem, rank, order) for rank, order in enumerate(orders)):
                return orders, is_interrupted
        if is_interrupted:
            return None, True
    return None, False


def _solved(
    problem: Problem, period: float, seed: int, effort: float, seconds: float
) -> tuple[list[float] | None, bool]:
    """Return the start of each computation of the first microbatch, by kind and stage."""
    import_or_tools()
    from ortools.sat.python import cp_model

    stages, unit = problem.num_stages, period / RESOLUTION
    numbers = range(0, len(problem.durations), problem.microbatches)
    durations = [math.ceil(problem.durations[number] / unit - EPSILON) for number in numbers]
    lags = [math.ceil(problem.lags[number] / unit - EPSILON) for number in numbers]
    model: Any = cp_model.CpModel()
    turns = MOST_TURNS * stages
    places = [model.new_int_var(0, RESOLUTION - 1, "") for _ in durations]
    starts = [model.new_int_var(0, RESOLUTION * turns, "") for _ in durations]
    for start, place in zip(starts, places, strict=True):
        model.add(start == place + RESOLUTION * model.new_int_var(0, turns, ""))
    model.add(starts[0] == 0)
    for row, number in enumerate(numbers):
        needed = problem.needs[number]
        if needed >= 0:
            source = needed // problem.microbatches
            model.add(starts[row] >= starts[source] + durations[source] + lags[row])
    for rank, cap in enumerate(problem.caps):
        mine = [stage for stage, where in enumerate(problem.stage_to_pp) if where == rank]
        rows = [kind * stages + stage for stage in mine for kind in (FORWARD, INPUT_HALF, WEIGHT_HALF)]
        intervals = [
            model.new_fixed_size_interval_var(places[row] + turn, durations[row], "")
            for row in rows
            for turn in (0, RESOLUTION)
        ]
        model.add_no_overlap(intervals)
        if math.isfinite(cap):
            model.add(sum(_held(problem, model, starts, durations, stage, cap) for stage in mine) <= CAP_UNITS)
    solver = new_solver(seed, effort, seconds)
    status, is_interrupted = solve_model(solver, model, None)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, is_interrupted
    return [solver.value(start) * unit for start in starts], is_interrupted


def _held(problem: Problem, model: Any, starts: list[Any], durations: list[int], stage: int, cap: float) -> Any:
    """Return the share of a cap that a stage holds at most: its activations live so many periods, rounded up."""
    first, last = stage, WEIGHT_HALF * problem.num_stages + stage
    lives = model.new_int_var(0, MOST_TURNS * problem.num_stages, "")
    model.add(starts[last] + durations[last] - starts[first] <= RESOLUTION * lives)
    amount = problem.reserved[problem.number(FORWARD, stage, 0)]
    return lives * math.ceil(amount / cap * CAP_UNITS * (1 - EPSILON) - EPSILON) if cap > 0 else lives * (amount > 0)
