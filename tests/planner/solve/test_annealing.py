"""Annealing: times after moves, and the periods of patterns, are those of the orders themselves."""

import math
import random

import pytest

from quintsched.schedules.kit.stage_placements import linear, v
from quintsched.simulation.costs import Costs
from quintsched.solve.list_policies import policies, schedule_by
from quintsched.solve.order_annealing import MoveEstimates, critical_path, random_move
from quintsched.solve.order_timing import has_room, time_orders
from quintsched.solve.periodic.pattern_annealing import PatternAnnealing, repeated_part
from quintsched.solve.periodic.periodic_orders import periodic_placements
from quintsched.solve.periodic.periodic_patterns import Pattern, unrolled
from quintsched.solve.search_problem import Problem, lower_bound, problem_of


def drawn(seed: int, microbatches: int) -> Problem:
    """Return a problem with unlike stages and kinds."""
    rng = random.Random(seed)
    placed = (linear(4, 1), v(3, 2))[seed % 2]
    forward, half, weight = (tuple(rng.uniform(0.5, 2.0) for _ in placed) for _ in range(3))
    costs = Costs(forward=forward, backward_input=half, backward_weight=weight, p2p=0.1 * (seed % 3))
    return problem_of(max(placed) + 1, microbatches, placed, costs, 3)


@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize("seed", range(4))
def test_an_estimate_is_at_most_the_time_after_a_swap_of_neighbours(seed, objective):
    problem, rng = drawn(seed, 8), random.Random(seed)
    orders = schedule_by(problem, next(policies(problem, rng)))
    exact = 0
    for _ in range(300):
        timing = time_orders(problem, orders)
        estimates = MoveEstimates.of(problem, orders, timing, objective)
        rank, source, target = random_move(orders, critical_path(problem, orders, timing, objective), rng)
        target = min(max(target, source - 1), source + 1)
        if source == target:
            continue
        estimate = estimates.after(rank, source, target)
        order = orders[rank]
        order.insert(target, order.pop(source))
        after = time_orders(problem, orders)
        if after is not None:
            assert estimate <= after.value(objective) + 1e-9
            exact += estimate > after.value(objective) - 1e-9
        if after is None or not has_room(problem, rank, order):
            order.insert(source, order.pop(target))
    assert exact > 100


def period_of(problem: Problem, pattern: Pattern) -> float:
    """Return the time of a turn in the middle of a long step."""
    length = pattern.length
    timing = time_orders(problem, unrolled(problem, pattern.starts(math.ceil(problem.microbatches / length))))
    first, last = problem.microbatches // 2 // length * length, problem.microbatches // 4 // length * length * 3
    return (timing.starts[last] - timing.starts[first]) * length / (last - first)


@pytest.mark.parametrize("seed", range(4))
def test_a_period_is_that_of_the_unrolled_orders(seed):
    problem, rng, moved = drawn(seed, 160), random.Random(seed), 0
    placement = list(periodic_placements(problem, rng))[-1]
    pattern = Pattern(problem, placement.starts_of(2), 2 * placement.period)
    for _ in range(200):
        before, most = pattern.orders, pattern.period * rng.choice((1.0, 1.02, 1.2))
        if not pattern.jump(rng.randrange(len(pattern.turns)), rng.choice((-3, -1, 1, 3)), most):
            assert pattern.orders == before
            continue
        moved += 1
        assert pattern.period <= most * (1 + 1e-9)
        orders = unrolled(problem, pattern.starts(80))
        assert all(has_room(problem, rank, order) for rank, order in enumerate(orders))
        assert period_of(problem, pattern) == pytest.approx(pattern.period)
    assert moved > 10


def test_what_repeats_in_the_middle_of_a_step_is_found():
    problem, rng = drawn(0, 160), random.Random(0)
    placement = list(periodic_placements(problem, rng))[-1]
    pattern = Pattern(problem, placement.starts_of(3), 3 * placement.period)
    while not pattern.jump(rng.randrange(len(pattern.turns)), 1, 1.1 * pattern.period):
        pass
    timing = time_orders(problem, unrolled(problem, pattern.starts(54)))
    ((starts, period),) = repeated_part(problem, timing.starts)
    assert period == pytest.approx(pattern.period)
    assert Pattern(problem, starts, period).period == pytest.approx(period)


def test_unlike_kinds_at_half_of_the_memory_are_near_the_bound():
    rng = random.Random(0)
    times = [rng.uniform(0.35, 0.75) for _ in range(4) for _ in range(2)]
    kinds = (tuple(factor * time for time in times) for factor in (1.0, 1.2, 0.8))
    costs = Costs(**dict(zip(("forward", "backward_input", "backward_weight"), kinds, strict=True)))
    problem = problem_of(4, 120, v(4, 2), costs, 2)
    bound = lower_bound(problem, "span").value
    placement = list(periodic_placements(problem, random.Random(0)))[-1]
    placed = time_orders(problem, unrolled(problem, placement.starts_of(120))).value("span") / bound - 1
    gaps, firsts = [], [(placement.starts_of(1), placement.period)]
    annealing = PatternAnnealing(problem, firsts, random.Random(0), lambda: False)
    for orders in annealing.round(0, random.Random(0), lambda: False, is_last=False):
        assert all(has_room(problem, rank, order) for rank, order in enumerate(orders))
        gaps.append(time_orders(problem, orders).value("span") / bound - 1)
        if gaps[-1] < 0.05:
            break
    assert min(gaps) < 0.05
    assert placed > 0.3
