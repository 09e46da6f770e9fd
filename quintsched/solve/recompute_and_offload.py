"""More room under a cap, for time: stages that recompute, and activations that are offloaded or lent.

stages tried   R . . .   first those whose activations fill the cap most, for most time; from the best of these on,
               R R . .   single stages change while the step of few microbatches gets shorter
moved          F0 F1 F2 B0 …   an order for a looser cap   ─▶   F0 F1 OA0 F2 FA0 B0 …   keeps to the real one
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from time import monotonic

from quintsched.errors import UsageError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.solve.list_policies import MANNERS, policies, schedule_by
from quintsched.solve.order_bounds import lower_bound
from quintsched.solve.order_certificate import value_of
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_search import Attempt, Search
from quintsched.solve.order_timing import time_orders
from quintsched.solve.search_problem import NoRoomError, Orders, Problem, problem_of

SEARCHED, FEW = 2, 3
"""Best choices of stages that are searched, beside that of all, and microbatches per rank of a trial."""
OFFLOADED, LENT = "offloaded", "lent"
OTHER_CAPS = {
    OFFLOADED: ((1.25, 1.25), (1.5, 1.5), (2.0, 2.0), (math.inf, math.inf)),
    LENT: ((1.25, 0.75), (1.5, 0.5), (1.75, 0.25)),
}
"""Caps of the first and of the last rank, as multiples of the real one, of orders whose activations are then moved."""
How = Callable[..., Search]
PlanOf = Callable[..., Plan]
"""Functions that search with problems, and that compile a plan of a problem and orders."""
Moves = Mapping[str, PlanOf]
"""Compilation of plans that move activations to keep to the real cap, by what is done with them."""


def search_for_room(
    problems: list[tuple[Problem, Costs]],
    how: How,
    ends_s: float,
    chooses: bool,
    moves: Moves,
    known: Orders = (),
) -> tuple[Search, Plan | None]:
    """Search; then with other stages recomputing, if it `chooses`; then for plans that move activations, if any.

    `how` searches for orders; all ends at `ends_s`. Return the search, and its best plan where that moves activations;
    those of the order `known` are moved, too.
    """
    turns = 1 + chooses + bool(moves)
    try:
        done = how(problems, seconds=(ends_s - monotonic()) / turns)
    except UsageError:  # no order was timed in its share of the time
        return how(problems, seconds=ends_s - monotonic()), None
    if chooses and not done.is_interrupted:
        share, now_s = (ends_s - monotonic()) / (turns - 1), monotonic()
        others = (one for each in problems for one in recompute_choices(*each, done.objective, now_s + share / 2))
        done = how(others, seconds=share, after=done)
    if not moves or done.is_interrupted:
        return done, None
    return done, best_moved(done, how, moves, ends_s, known)


def recompute_choices(
    problem: Problem, costs: Costs | None, objective: Objective, ends_s: float
) -> Iterator[tuple[Problem, Costs | None]]:
    """Yield a problem with other stages recomputing: with all, and with those that few microbatches are fastest with.

    Without a cap, there is nothing to gain. Trials end at `ends_s` (of `time.monotonic`).
    """
    if math.isinf(min(problem.caps)):
        return
    microbatches, stages = problem.microbatches * problem.routes, problem.num_stages
    sizes = problem.pp, microbatches, problem.stage_to_pp, costs, problem.caps, problem.routes
    values: dict[tuple[int, ...], float] = {}

    def tried(choice: tuple[int, ...]) -> float:
        if choice not in values and monotonic() < ends_s:
            with suppress(NoRoomError):
                few = problem_of(*sizes, recompute=choice).shortened(min(problem.microbatches, FEW * problem.pp))
                values[choice] = _value(few, objective, min(values.values(), default=math.inf))
        return values.get(choice, math.inf)

    best = min(((1,) * count + (0,) * (stages - count) for count in range(stages + 1)), key=tried)
    before = None
    while best != before:
        before = best
        for stage in range(stages):
            best = min(best, (*best[:stage], 1 - best[stage], *best[stage + 1 :]), key=tried)
    for place, choice in enumerate(sorted(values, key=tried)):
        if choice != (problem.recompute or (0,) * stages) and (place < SEARCHED or all(choice)):
            yield problem_of(*sizes, recompute=choice), costs


def _value(problem: Problem, objective: Objective, best: float) -> float:
    """Return the time of the best usual list schedule; only a bound on it where none can beat the best."""
    if (bound := lower_bound(problem, objective).value) >= best:
        return bound
    orders = [schedule_by(problem, policy) for policy in islice(policies(problem, random.Random(0)), len(MANNERS))]
    timings = [time_orders(problem, problem.one_by_one), *(time_orders(problem, found) for found in orders if found)]
    return min(timing.value(objective) for timing in timings if timing)


def best_moved(done: Search, how: How, moves: Moves, ends_s: float, known: Orders = ()) -> Plan | None:
    """Return the best plan that moves activations, which becomes the best of a search; None if none is faster.

    `known` is an order that is tried first.
    """
    made, objective, took_s = list[tuple[Attempt, Plan]](), done.objective, 0.0

    def move(word: str, one: Attempt, orders: Orders, origin: str) -> None:
        free = _capped(one.problem, math.inf, math.inf)
        with suppress(UsageError):  # what a rank computes with has no room
            plan = moves[word](free, orders, costs=one.costs)
            other = Attempt(free, one.costs, objective, lower_bound(free, objective))
            value = value_of(plan.simulate(one.costs), objective)
            made.extend([(other, plan)] if value < done.value else [])
            done.keep(other, list(map(list, orders)), value, f"{origin}, {word}")

    tries = [(word, *caps) for word in moves for caps in OTHER_CAPS[word]]
    with suppress(KeyboardInterrupt, UsageError):  # also where the time is over before an order was timed
        for word in moves if known else ():
            move(word, done.attempts[0], known, "the recorded order")
        for number, (word, first, last) in enumerate(tries):
            others = [(_capped(one.problem, first, last), one.costs) for one in done.attempts]
            found = how(others, seconds=max(ends_s - monotonic(), 0.0) / (len(tries) - number), told=lambda *_: None)
            for one, orders in _candidates(found):
                began_s = monotonic()
                if began_s + took_s > ends_s:
                    break
                move(word, one, orders, one.origin)
                took_s = monotonic() - began_s
            if found.is_interrupted:
                break
    return next((plan for other, plan in made if other is done.best), None)


def _candidates(found: Search) -> Iterator[tuple[Attempt, Orders]]:
    """Yield each order of a search, and the same with whole backwards: between halves, nothing can be moved."""
    for one in found.attempts:
        each = len(one.problem.durations) // 3
        begun = ([number for number in order if number < 2 * each] for order in one.orders)
        whole = ([half for k in order for half in ((k, k + each) if k >= each else (k,))] for order in begun)
        yield from ((one, orders) for orders in (one.orders, tuple(map(tuple, whole))) if orders)


def _capped(problem: Problem, first: float, last: float) -> Problem:
    """Return the problem with caps that are multiples of its own, from the first to the last rank."""
    steps = max(problem.pp - 1, 1)
    shares = (first if first == last else first + (last - first) * rank / steps for rank in range(problem.pp))
    needs = map(problem.peak, problem.one_by_one)
    caps = (
        max(cap * share, need) if cap else 0.0 for cap, share, need in zip(problem.caps, shares, needs, strict=True)
    )
    return replace(problem, caps=tuple(caps))
