"""Constraint programming with OR-Tools' CP-SAT, which is imported only here: intervals on ranks, caps as resources.

It begins with the best order so far. Its own lower bound is a proof only where all times are multiples of one unit and
microbatches are alike; else they are rounded, and only the order that it finds counts.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quintsched.solve.order_lower_bounds import head
from quintsched.solve.order_problem import EPSILON, INPUT_HALF, WEIGHT_HALF, Objective
from quintsched.solve.search_problem import Problem

MOST_COMPUTATIONS = 4_000
"""Largest problem that it is asked to solve."""
RESOLUTION = 10_000
"""Units in which a step is counted where times have no common unit."""
MOST_UNITS = 10_000_000
CAP_UNITS = 1_000_000
"""Units in which a cap is counted where activations have no common unit."""
WORKERS = 1


@dataclass(frozen=True)
class SolverAnswer:
    """Orders found (None: none better), the proved lower bound (None: none), and whether Ctrl-C ended the search."""

    orders: list[list[int]] | None
    bound: float | None
    is_interrupted: bool


def is_installed() -> bool:
    """Return whether OR-Tools is installed (`pip install quintsched[solve]`)."""
    return importlib.util.find_spec("ortools") is not None


def import_or_tools() -> None:
    """Import OR-Tools in a thread: an interrupt in the middle of an import would leave half of it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(importlib.import_module, "ortools.sat.python.cp_model").result()


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
) -> SolverAnswer:
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
    import_or_tools()
    from ortools.sat.python import cp_model

    unit, is_exact = _unit(problem, value)
    scaled = [round(duration / unit) for duration in problem.durations]
    most = round(value / unit) if is_exact else math.floor(value / unit)
    model, begins = _model(problem, [round(start / unit) for start in starts], most, objective, unit)
    solver = new_solver(seed, effort, seconds)

    class _Watch(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            if stops():
                self.stop_search()

    status, is_interrupted = solve_model(solver, model, _Watch())
    proves = is_exact and problem.are_alike
    bound = solver.best_objective_bound * unit if proves and status != cp_model.UNKNOWN else None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SolverAnswer(None, bound, is_interrupted)

    def place(number: int) -> tuple[int, bool, int, int]:
        """Return the place in time; of computations at the same time, those without duration go first."""
        return solver.value(begins[number]), scaled[number] > 0, number % problem.microbatches, number

    orders: list[list[int]] = [[] for _ in range(problem.pp)]
    for number in sorted(range(len(scaled)), key=place):
        orders[problem.ranks[number]].append(number)
    return SolverAnswer(orders, bound, is_interrupted)


def _model(problem: Problem, hints: list[int], most: int, objective: Objective, unit: float) -> tuple[Any, list[Any]]:
    """Return the model of orders that take at most `most` units, and its variables: the start of each computation."""
    from ortools.sat.python import cp_model

    scaled = [round(duration / unit) for duration in problem.durations]
    lags, delays = ([math.ceil(one / unit - EPSILON) for one in table] for table in (problem.lags, problem.delays))
    heads = [head(problem, rank) / unit for rank in range(problem.pp)]
    firsts: list[Any] = [round(time) if objective == "span" else 0 for time in heads]
    # With two routes, a rank may begin with either: within the span of the rank that begins first, as each microbatch
    # is there before it begins to come back, or else later.
    begins_vary = objective == "span" and problem.routes > 1
    horizon = most + (most if begins_vary else math.ceil(max(heads))) + 2
    model: Any = cp_model.CpModel()
    begins = [model.new_int_var(0, horizon, "") for _ in scaled]
    for number, (begin, hint) in enumerate(zip(begins, hints, strict=True)):
        needed = problem.needs[number]
        if needed >= 0:
            model.add(begin >= begins[needed] + scaled[needed] + delays[number])
        model.add_hint(begin, hint)
    for rank in range(problem.pp):
        mine = [number for number in range(len(scaled)) if problem.ranks[number] == rank]
        model.add_no_overlap([model.new_fixed_size_interval_var(begins[n], scaled[n], "") for n in mine])
    if problem.are_alike or problem.recompute_microbatches:  # the latter: orders that are left out are seldom better
        for first in range(0, len(scaled), problem.microbatches):
            for number in range(first + 1, first + problem.microbatches):
                model.add(begins[number] >= begins[number - 1] + scaled[number - 1])
    _add_wires(model, problem, begins, scaled, lags, delays, horizon)
    _add_caps(model, problem, begins, scaled, horizon)
    best = model.new_int_var(0, most, "")
    if begins_vary:
        firsts = [model.new_int_var(first, most, "") for first in firsts]
        for number in range(len(scaled) // 3):
            model.add(firsts[problem.ranks[number]] <= begins[number])
    for number in range(2 * len(scaled) // 3, len(scaled)):
        model.add(best >= begins[number] + scaled[number] - firsts[problem.ranks[number]])
    model.minimize(best)
    return model, begins


def new_solver(seed: int, effort: float, seconds: float) -> Any:
    """Return a solver that ends after this work, in its deterministic seconds, or after these seconds."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = WORKERS
    solver.parameters.interleave_search = False
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = max(seconds, 0.1)
    return solver


def solve_model(solver: Any, model: Any, watch: Any) -> tuple[Any, bool]:
    """Solve in a thread of its own, so that an interrupt stops it; return the status and whether one came."""
    with ThreadPoolExecutor(1) as pool:
        solving, is_interrupted = pool.submit(solver.solve, model, watch), False
        while True:
            try:
                return solving.result(), is_interrupted
            except KeyboardInterrupt:
                is_interrupted = True
                solver.stop_search()


def _unit(problem: Problem, value: float) -> tuple[float, bool]:
    """Return the unit of time, and whether all times are multiples of it."""
    times = [time for time in (*problem.durations, *problem.lags, *problem.leads) if time > 0]
    least = min(times, default=1.0)
    for parts in range(1, 11):
        unit = least / parts
        if value / unit <= MOST_UNITS and all(abs(time / unit - round(time / unit)) < EPSILON for time in times):
            return unit, True
    return value / RESOLUTION, False


def _add_wires(
    model: Any, problem: Problem, begins: list[Any], scaled: list[int], lags: list[int], delays: list[int], horizon: int
) -> None:
    """Let the messages from one rank to another not overlap, in any order.

    Where none takes longer than the computations of the sender, they never do.
    """
    wires: dict[int, list[int]] = {}
    for number, wire in enumerate(problem.wires):
        if wire >= 0:
            wires.setdefault(wire, []).append(number)
    for numbers in wires.values():
        if max(lags[number] for number in numbers) <= min(scaled[problem.needs[number]] for number in numbers):
            continue
        sent = []
        for number in numbers:
            begin, needed = model.new_int_var(0, horizon, ""), problem.needs[number]
            model.add(begin >= begins[needed] + scaled[needed])
            model.add(begins[number] >= begin + delays[number])
            sent.append(model.new_fixed_size_interval_var(begin, lags[number], ""))
        model.add_no_overlap(sent)


def _add_caps(model: Any, problem: Problem, begins: list[Any], scaled: list[int], horizon: int) -> None:
    """Add the caps, with activations rounded down: bounds stay proofs, and orders that do not fit are dropped later."""
    each = problem.num_stages * problem.microbatches
    for rank, cap in enumerate(problem.caps):
        mine = [number for number in range(each) if problem.ranks[number] == rank]
        if math.isinf(cap) or sum(problem.reserved[number] for number in mine) <= cap * (1 + EPSILON):
            continue
        parts = []
        for number in mine:
            half, weight = each * INPUT_HALF + number, each * WEIGHT_HALF + number
            most, added = problem.holds[number], problem.holds[half]
            first = (number, half, -added) if added < 0 else (half, weight, added)
            brief = problem.rises[half] - max(added, 0.0)
            parts += [first, (number, weight, min(most, most + added)), (half, half, brief)]
        parts = [part for part in parts if part[2] > 0]
        least = min(amount for *_, amount in parts)
        shares = [amount / least for *_, amount in parts]
        if cap / least <= MOST_UNITS and all(abs(share - round(share)) < EPSILON for share in shares):
            amounts, most = list(map(round, shares)), math.floor(cap / least * (1 + EPSILON))
        else:
            amounts, most = [math.floor(amount / cap * CAP_UNITS) for *_, amount in parts], CAP_UNITS
        held = []
        for from_, to, _ in parts:
            length = model.new_int_var(0, horizon, "")
            held.append(model.new_interval_var(begins[from_], length, begins[to] + scaled[to], ""))
        model.add_cumulative(held, amounts, most)
