"""Constraint programming with OR-Tools' CP-SAT, which is imported only here: intervals on ranks, caps as resources.

It begins with the best order so far. Its own lower bound is a proof only where all times are multiples of one unit and
microbatches are alike; else they are rounded, and only the order that it finds counts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quintsched.solve.order_bounds import head
from quintsched.solve.order_problem import EPSILON, INPUT_HALF, WEIGHT_HALF, Problem
from quintsched.solve.order_timing import Objective

MOST_COMPUTATIONS = 4_000
"""Largest problem that it is asked to solve."""
RESOLUTION = 100_000
"""Units in which a step is counted where times have no common unit."""
MOST_UNITS = 10_000_000
CAP_UNITS = 10_000
WORKERS = 1


@dataclass(frozen=True)
class Answer:
    """Orders found (None: none better), and the proved lower bound (None: none)."""

    orders: list[list[int]] | None
    bound: float | None


def is_installed() -> bool:
    """Return whether OR-Tools is installed (`pip install quintsched[solve]`)."""
    return importlib.util.find_spec("ortools") is not None


def improve(
    problem: Problem,
    starts: Sequence[float],
    value: float,
    objective: Objective,
    *,
    seed: int,
    effort: float,
    seconds: float,
    stops: Callable[[], bool],
) -> Answer:
    """Search for a better order than the one that starts its computations at `starts`.

    Args:
        problem: the problem.
        starts: the start of each computation in the best order so far.
        value: its value.
        objective: what is minimised.
        seed: of the search, which is deterministic for an effort.
        effort: work of the search, in CP-SAT's deterministic seconds.
        seconds: most seconds that it takes.
        stops: asked between solutions whether to end.
    """
    from ortools.sat.python import cp_model

    unit, is_exact = _unit(problem, value)
    scaled = [round(duration / unit) for duration in problem.durations]
    lags = [math.ceil(lag / unit - EPSILON) for lag in problem.lags]
    horizon = math.ceil(value / unit) + math.ceil(max(head(problem, rank) for rank in range(problem.pp)) / unit) + 1
    model: Any = cp_model.CpModel()
    begins = [model.new_int_var(0, horizon, "") for _ in scaled]
    for number, begin in enumerate(begins):
        needed = problem.needs[number]
        if needed >= 0:
            model.add(begin >= begins[needed] + scaled[needed] + lags[number])
        model.add_hint(begin, round(starts[number] / unit))
    for rank in range(problem.pp):
        mine = [number for number in range(len(scaled)) if problem.ranks[number] == rank]
        model.add_no_overlap([model.new_fixed_size_interval_var(begins[n], scaled[n], "") for n in mine])
    if problem.are_alike:
        for first in range(0, len(scaled), problem.microbatches):
            for number in range(first + 1, first + problem.microbatches):
                model.add(begins[number] >= begins[number - 1] + scaled[number - 1])
    fits = _add_caps(model, problem, begins, scaled, horizon)
    best = model.new_int_var(0, math.floor(value / unit + EPSILON), "")
    for rank in range(problem.pp):
        start = math.floor(head(problem, rank) / unit + EPSILON) if objective == "span" else 0
        for number in range(2 * len(scaled) // 3, len(scaled)):
            if problem.ranks[number] == rank:
                model.add(best >= begins[number] + scaled[number] - start)
    model.minimize(best)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = WORKERS
    solver.parameters.interleave_search = False
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = max(seconds, 0.1)

    class _Watch(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            if stops():
                self.stop_search()

    status = solver.solve(model, _Watch())
    proves = is_exact and fits and problem.are_alike
    bound = solver.best_objective_bound * unit if proves and status != cp_model.UNKNOWN else None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound)
    orders: list[list[int]] = [[] for _ in range(problem.pp)]
    for number in sorted(range(len(scaled)), key=lambda number: (solver.value(begins[number]), number)):
        orders[problem.ranks[number]].append(number)
    return Answer(orders, bound)


def _unit(problem: Problem, value: float) -> tuple[float, bool]:
    """Return the unit of time, and whether all times are multiples of it."""
    times = [time for time in (*problem.durations, *problem.lags) if time > 0]
    least = min(times, default=1.0)
    for parts in range(1, 11):
        unit = least / parts
        if value / unit <= MOST_UNITS and all(abs(time / unit - round(time / unit)) < EPSILON for time in times):
            return unit, True
    return value / RESOLUTION, False


def _add_caps(model: Any, problem: Problem, begins: list[Any], scaled: list[int], horizon: int) -> bool:
    """Add the caps; return whether activations are multiples of one unit, so that nothing is rounded up."""
    is_exact, each = True, problem.num_stages * problem.microbatches
    for rank, cap in enumerate(problem.caps):
        mine = [number for number in range(each) if problem.ranks[number] == rank]
        if math.isinf(cap) or sum(problem.holds[number] for number in mine) <= cap + EPSILON:
            continue
        parts = [
            (number, each * kind + number, -problem.holds[each * kind + number])
            for number in mine
            for kind in (INPUT_HALF, WEIGHT_HALF)
            if problem.holds[each * kind + number] < 0
        ]
        least = min(amount for *_, amount in parts)
        if all(abs(amount / least - round(amount / least)) < EPSILON for *_, amount in parts):
            amounts, most = [round(amount / least) for *_, amount in parts], math.floor(cap / least + EPSILON)
        else:
            is_exact = False
            amounts = [math.ceil(amount / cap * CAP_UNITS) for *_, amount in parts]
            most = CAP_UNITS
        held = []
        for from_, to, _ in parts:
            length = model.new_int_var(0, horizon, "")
            held.append(model.new_interval_var(begins[from_], length, begins[to] + scaled[to], ""))
        model.add_cumulative(held, amounts, most)
    return is_exact
