"""Orders for durations that vary: never much worse than those found without regard to it, on samples of their own."""

import random
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest

import quintsched as qs
from quintsched.errors import UsageError
from quintsched.ir.mesh import Mesh
from quintsched.schedules.kit.stage_placements import linear, v
from quintsched.solve import solve
from quintsched.solve.noise.duration_samples import Jitter, Samples, percentile
from quintsched.solve.order_timing import time_orders
from quintsched.solve.search_problem import lower_bound, problem_of
from quintsched.solve.solved_plan import plan_of
from quintsched.solve.starting_orders import named_orders
from tests.traces import write_trace


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_samples_are_timed_as_one_by_one(objective):
    for placed in (linear(4, 1), v(4, 2)):
        problem = problem_of(4, 8, placed, qs.Costs(p2p=2.5))
        samples = Samples.draw(problem, Jitter.parse("0.4"), 5, (0, 0))
        for _, orders in named_orders(problem, None):
            values = samples.values(orders, objective)
            each = [replace(problem, durations=tuple(column.tolist())) for column in samples.durations.T]
            timings = [time_orders(one, orders) for one in each]
            assert values == pytest.approx([timing.value(objective) for timing in timings])
            assert all(
                value >= lower_bound(one, objective).value - 1e-9 for value, one in zip(values, each, strict=True)
            )


def test_a_recomputation_varies_with_its_backward():
    base = {"forward": 1.0, "backward_input": 0.2, "backward_weight": 1.0, "recompute": 3.0}
    problem = problem_of(3, 4, linear(3, 1), qs.Costs(**base, p2p=0.5), recompute=(1, 1, 0))
    plan = plan_of(problem, problem.one_by_one, Mesh(pp=3))
    samples = Samples.draw(problem, Jitter.parse("0.4"), 5, (0, 0))
    factors = (samples.durations / np.array(problem.durations)[:, None]).T.reshape(5, 3, 3, 4).tolist()
    for value, (forward, half, weight) in zip(samples.values(problem.one_by_one, "span"), factors, strict=True):
        cells = zip(base.items(), (forward, half, weight, half), strict=True)
        each = {name: {"stages": (time,) * 3, "cells": rows} for (name, time), rows in cells}
        assert value == pytest.approx(plan.simulate(qs.Costs(**each, p2p=0.5)).span)


def order_of(problem, plan):
    """Return the numbers of a solved plan's computations."""
    return [*map(problem.numbers, plan.programs)]


@pytest.mark.parametrize(("jitter", "closes"), [("0.1", 0.1), pytest.param("3%x4", 0.0, marks=pytest.mark.slow)])
def test_the_percentile_is_that_of_other_samples_and_never_much_worse(jitter, closes):
    sizes = {"pp": 4, "microbatches": 16, "placement": "linear", "memory_cap": 6, "effort": 1, "seconds": 600}
    nominal, found = solve(**sizes), solve(**sizes, jitter=jitter)
    problem = problem_of(4, 16, linear(4, 1), None, 6)
    samples = Samples.draw(problem, Jitter.parse(jitter), 2000, (99, 99))
    values = [percentile(samples.values(order_of(problem, one.plan), "span")) for one in (nominal, found)]
    assert values[1] <= values[0] * 1.005
    said = found.robustness
    assert said.bound <= said.value <= said.nominal * 1.005
    assert values == pytest.approx([said.nominal, said.value], rel=0.02)
    assert said.closed >= closes
    assert max(found.plan.simulate().peak_activations) <= 6
    assert solve(**sizes, jitter=jitter).plan == found.plan


@pytest.mark.parametrize("seed", [-1, 0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
@pytest.mark.parametrize("pp", [1, 2])
def test_no_order_is_below_the_bound(pp, seed):
    """Percentile of bounds, which is that of an order that is the best in each sample."""
    found = solve(pp=pp, microbatches=6, placement="linear", jitter="0.3", effort=1, seconds=20, seed=seed)
    said = found.robustness
    assert said.bound <= said.value * (1 + 1e-9)
    assert said.closed <= 1 + 1e-9
    if pp == 1:
        assert said.bound == pytest.approx(said.value)


def test_an_interrupt_ends_the_search_under_noise_too():
    def told(*_):
        raise KeyboardInterrupt

    began_s = monotonic()
    found = solve(pp=4, microbatches=16, placement="linear", jitter="0.1", effort=50, seconds=2000, told=told)
    assert monotonic() - began_s < 200
    assert found.robustness.bound <= found.robustness.value


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_instances_are_never_much_worse(seed):
    rng = random.Random(seed)
    pp = rng.choice((2, 3, 4))
    each = lambda: tuple(rng.uniform(0.5, 2.0) for _ in range(pp))  # noqa: E731
    costs = qs.Costs(forward=each(), backward_input=each(), backward_weight=each(), p2p=rng.choice((0.0, 0.3)))
    sizes = {"pp": pp, "microbatches": 3 * pp, "placement": "linear", "memory_cap": pp, "costs": costs, "seconds": 60}
    found = solve(**sizes, effort=2, jitter=rng.choice(("0.05", "0.3", "3%x4")))
    assert found.robustness.value <= found.robustness.nominal * 1.005


def test_jitter_is_read_and_wrong_ones_are_refused(tmp_path):
    factors = Jitter.parse("25 % x 4").factors(np.random.default_rng(0), 100, 100)
    assert sorted(set(factors.ravel())) == [1, 4]
    assert (factors == 4).mean() == pytest.approx(0.25, abs=0.02)
    assert np.log(Jitter.parse("0.2").factors(np.random.default_rng(0), 100, 100)).std() == pytest.approx(0.2, rel=0.05)
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)
    write_trace(tmp_path, plan.simulate(qs.Costs(unit="ms", forward=10.0)), jitter=0.2)
    plan.save(tmp_path / "plan.json")
    measured = Jitter.parse(str(tmp_path)).measured
    assert len(measured) >= 16
    assert np.median(measured) == pytest.approx(1, abs=0.02)
    assert np.std(measured) > 0
    write_trace(tmp_path, plan.simulate(qs.Costs(unit="ms", forward=10.0)))
    assert Jitter.parse(str(tmp_path)).measured == pytest.approx([1.0] * 16, abs=1e-3)
    for text, why in (
        ("nowhere", "give a number"),
        ("-1", "from 0 to 3"),
        ("nan", "from 0 to 3"),
        ("101%x2", "at most 100 %"),
    ):
        with pytest.raises(UsageError, match=why):
            Jitter.parse(text)
