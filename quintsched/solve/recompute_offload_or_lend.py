"""More room under a cap, for time: activations that are recomputed, offloaded to host memory, or lent to other ranks.

recomputed     other choices of stages and microbatches are searched, as `recompute_choices` finds them
moved          F0 F1 F2 B0 …   an order for a looser cap   ─▶   F0 F1 OA0 F2 FA0 B0 …   keeps to the real one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from quintsched.errors import UsageError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.solve.check_order_certificate import value_of
from quintsched.solve.order_search import OrderSearch, PlacementSearch
from quintsched.solve.recompute_choices import recompute_choices
from quintsched.solve.search_problem import Orders, Problem, lower_bound

OFFLOADED, LENT = "offloaded", "lent"
SETTINGS = {OFFLOADED: "offload", LENT: "lend"}
"""Setting of the cap, by what is done with activations beyond it."""
OTHER_CAPS = {
    OFFLOADED: ((1.25, 1.25), (1.5, 1.5), (2.0, 2.0), (math.inf, math.inf)),
    LENT: ((1.25, 0.75), (1.5, 0.5), (1.75, 0.25)),
}
"""Caps of the first and of the last rank, as multiples of the real one, of orders whose activations are then moved."""
How = Callable[..., OrderSearch]
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
) -> tuple[OrderSearch, Plan | None]:
    """Search; then with others recomputing, if it `chooses`; then for plans that move activations, if any.

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


def best_moved(done: OrderSearch, how: How, moves: Moves, ends_s: float, known: Orders = ()) -> Plan | None:
    """Return the best plan that moves activations, which becomes the best of a search; None if none is faster.

    `known` is an order that is tried first.
    """
    made, objective, took_s = list[tuple[PlacementSearch, Plan]](), done.objective, 0.0

    def move(word: str, one: PlacementSearch, orders: Orders, origin: str) -> None:
        free = _capped(one.problem, math.inf, math.inf)
        with suppress(UsageError):  # what a rank computes with has no room
            plan = moves[word](free, orders, costs=one.costs)
            other = PlacementSearch(free, one.costs, objective, lower_bound(free, objective))
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


def _candidates(found: OrderSearch) -> Iterator[tuple[PlacementSearch, Orders]]:
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
