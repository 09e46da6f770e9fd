"""Orders that repeat: they keep to their caps, and many microbatches take hardly longer than the certified bound."""

from __future__ import annotations

import random

import pytest

from quintsched.ir.placement import linear, loop, v
from quintsched.simulation.costs import Costs
from quintsched.solve import certify, solve
from quintsched.solve.order_bounds import lower_bound
from quintsched.solve.order_timing import has_room, time_orders
from quintsched.solve.periodic_orders import least_period, periodic_orders
from quintsched.solve.periodic_solving import solved_periodic_order
from quintsched.solve.search_problem import Problem, problem_of


def drawn(seed: int, pp: int, chunks: int) -> Costs:
    """Return costs of stages whose times differ by up to a factor of two."""
    rng = random.Random(seed)
    times = tuple(rng.uniform(0.7, 1.5) / chunks for _ in range(pp * chunks))
    held = (1 / chunks,) * (pp * chunks)
    return Costs(forward=times, backward_input=times, backward_weight=times, activation=held)


def gap(problem: Problem, orders: list[list[int]]) -> float:
    """Return by how much orders are longer than the bound, after checking that they are complete and keep to caps."""
    assert sorted(number for order in orders for number in order) == list(range(len(problem.durations)))
    assert all(has_room(problem, rank, order) for rank, order in enumerate(orders))
    timing = time_orders(problem, orders)
    assert timing is not None
    return timing.value("span") / lower_bound(problem, "span").value - 1


@pytest.mark.parametrize("seed", range(6))
def test_one_stage_on_a_rank(seed: int) -> None:
    costs = drawn(seed, 6, 1).model_copy(update={"p2p": 0.1 * (seed % 2)})
    problem = problem_of(6, 300, linear(6, 1), costs, 6 if seed < 3 else 7)
    assert min(gap(problem, orders) for orders in periodic_orders(problem)) < 0.02
    tight = problem_of(6, 300, linear(6, 1), costs, 3)
    assert min(gap(tight, orders) for orders in periodic_orders(tight)) < 0.4
    assert least_period(tight) >= least_period(problem)


@pytest.mark.parametrize(("place", "cap"), [(v, 3), (v, 4), (loop, 4)])
def test_several_stages_on_a_rank(place, cap: int) -> None:
    pytest.importorskip("ortools")
    problem = problem_of(4, 200, place(4, 2), drawn(cap, 4, 2), cap)
    orders, _ = solved_periodic_order(problem, seed=0, effort=5, ends=lambda: 100.0, stops=lambda: False)
    assert orders is not None
    assert gap(problem, orders) < 0.05


def test_microbatches_that_differ_have_none() -> None:
    costs = Costs(microbatches=(1.0, 2.0) * 20)
    assert not list(periodic_orders(problem_of(4, 40, linear(4, 1), costs, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "cap"), [("v", 8), ("v", 16), ("linear", 16)])
@pytest.mark.parametrize("seed", range(3))
def test_long_steps_are_within_two_percent_of_the_certified_bound(placement: str, cap: int, seed: int) -> None:
    costs = drawn(seed, 16, 2 if placement == "v" else 1)
    found = solve(pp=16, microbatches=512, placement=placement, memory_cap=cap, costs=costs, seconds=60)
    assert found.certificate.gap < 0.02
    certify(found.plan, found.certificate)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_long_steps_choose_the_placement_that_is_within_two_percent(cap: int, seed: int) -> None:
    found = solve(pp=16, microbatches=512, memory_cap=cap, costs=drawn(seed, 16, 1), seconds=60)
    assert found.certificate.gap < 0.02
    assert found.certificate.value <= found.bounds["linear"] or found.placement == "linear"
    certify(found.plan, found.certificate)
