"""Orders that repeat: they keep to their caps, and many microbatches take hardly longer than the certified bound."""

import random

import pytest

from quintsched.schedules.kit.stage_placements import bidirectional, linear, loop, v
from quintsched.simulation.costs import Costs
from quintsched.solve import certify, solve
from quintsched.solve.named_placements import cut_in_parts
from quintsched.solve.order_search import PlacementSearch
from quintsched.solve.order_timing import has_room, time_orders
from quintsched.solve.periodic.periodic_orders import least_period, periodic_placements
from quintsched.solve.periodic.periodic_patterns import unrolled
from quintsched.solve.search_problem import Problem, lower_bound, problem_of


def drawn(seed: int, pp: int, chunks: int) -> Costs:
    """Return costs of stages whose times differ by up to a factor of two."""
    rng = random.Random(seed)
    times = tuple(rng.uniform(0.7, 1.5) / chunks for _ in range(pp * chunks))
    held = (1 / chunks,) * (pp * chunks)
    return Costs(forward=times, backward_input=times, backward_weight=times, activation=held)


def least_gap(problem: Problem) -> float:
    """Return by how much the best orders are longer than the bound; all are complete and keep to their caps."""
    gaps = []
    for placement in periodic_placements(problem, random.Random(0)):
        orders = unrolled(problem, placement.starts_of(problem.microbatches))
        assert sorted(number for order in orders for number in order) == list(range(len(problem.durations)))
        assert all(has_room(problem, rank, order) for rank, order in enumerate(orders))
        timing = time_orders(problem, orders)
        assert timing is not None
        gaps.append(timing.value("span") / lower_bound(problem, "span").value - 1)
    return min(gaps)


HALVES = drawn(3, 4, 3).model_copy(update={"backward_input": drawn(5, 4, 3).forward, "p2p": 0.05})

PROBLEMS: list[tuple[Problem, float]] = [
    *((problem_of(4, 64, bidirectional(4, 1), None, cap, routes=2), most) for cap, most in ((2, 0.4), (3, 0.25))),
    *((problem_of(6, 300, linear(6, 1), drawn(seed, 6, 1), cap), 0.01) for seed, cap in ((0, 6), (1, 6), (2, 7))),
    (problem_of(6, 300, linear(6, 1), drawn(3, 6, 1).model_copy(update={"p2p": 0.1}), 7), 0.01),
    *((problem_of(6, 300, linear(6, 1), drawn(seed, 6, 1), 3), 0.25) for seed in range(2)),
    *((problem_of(4, 200, place(4, 2), drawn(cap, 4, 2), cap), 0.01) for place, cap in ((v, 3), (v, 4), (loop, 4))),
    *((problem_of(4, 200, v(4, 3), HALVES, cap), 0.03) for cap in (5, None)),
    (problem_of(16, 512, v(16, 2), cut_in_parts(drawn(0, 16, 1), 16, 32), 8), 0.015),
]
"""Both ways, one stage on a rank, also under tight caps, several, and many microbatches at half of the memory."""


@pytest.mark.parametrize(("problem", "most"), PROBLEMS)
def test_the_best_are_near_the_bound(problem: Problem, most: float) -> None:
    assert least_gap(problem) < most


def test_a_tighter_cap_has_no_shorter_period() -> None:
    wide, tight = (problem_of(6, 300, linear(6, 1), drawn(0, 6, 1), cap) for cap in (6, 3))
    assert least_period(tight) >= least_period(wide)


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "cap"), [("auto", 8), ("auto", 16), ("linear", 16)])
@pytest.mark.parametrize("seed", range(3))
def test_long_steps_are_certified_within_two_percent(placement: str, cap: int, seed: int) -> None:
    def end_when_near(attempt: PlacementSearch, seconds: float) -> None:
        if attempt.value < 1.02 * attempt.bound.value:
            raise KeyboardInterrupt

    costs = drawn(seed, 16, 1)
    found = solve(pp=16, microbatches=512, placement=placement, memory_cap=cap, costs=costs, told=end_when_near)
    assert found.certificate.gap < 0.02
    assert found.certificate.value <= found.bounds["linear"] or found.placement == "linear"
    certify(found.plan, found.certificate)
