"""Bytes that autograd saves for backwards: the measured peak is the simulated one, for every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.summed_losses import cross_entropy_sum
from quintsched.schedules import all_schedules

from ..toys import ids_task, sgd, tiny_gpt

TRAINING = [found for found in all_schedules() if found.mode == "train"]


def measure(plan: qs.Plan) -> tuple[list[int], tuple[float, ...]]:
    """Return the measured peak of every rank, and the simulated one from what single units hold."""
    task = ids_task(2, 16, length=8)

    def run(transport: Transport) -> tuple[int, tuple[float, ...]]:
        engine = Engine(plan, tiny_gpt(8, depth=6), cross_entropy_sum, sgd, dtype=torch.float32, transport=transport)
        engine.step(task.inputs[0], task.targets[0])
        _, counted = engine.step_counting_saved(task.inputs[1], task.targets[1])
        return counted.peak, plan.simulate(engine.saved_costs(counted)).peak_activations

    found = run_local(plan.mesh.size, run)
    return [peak for peak, _ in found], found[0][1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("recompute", [0, 1])
def test_the_peak_is_the_simulated_one(schedule: qs.Schedule, recompute: int) -> None:
    slices = 2 if schedule.max_slices > 1 else 1
    plan = qs.compile(schedule, mesh="pp=2", microbatches=8, slices=slices, recompute=recompute)
    measured, simulated = measure(plan)
    assert measured == pytest.approx(simulated, rel=0.01)


def test_what_waits_between_the_halves_of_a_backward_is_counted() -> None:
    """The products of all weights: inputs as well as gradients."""
    plan = qs.compile("zb-h1", mesh="pp=1", microbatches=4)
    task = ids_task(1, 8, length=8)

    def run(transport: Transport) -> qs.Costs:
        engine = Engine(plan, tiny_gpt(8, depth=6), cross_entropy_sum, sgd, dtype=torch.float32, transport=transport)
        return engine.saved_costs(engine.step_counting_saved(task.inputs[0], task.targets[0])[1])

    (costs,) = run_local(1, run)
    assert costs.activation_after_input[0] > 0.9 * costs.activation[0]


def test_1f1b_holds_less_than_gpipe() -> None:
    gpipe = qs.compile("gpipe", mesh="pp=2", microbatches=8)
    (first, _), _ = measure(replace(gpipe))
    (fewer, _), _ = measure(qs.compile("1f1b", mesh="pp=2", microbatches=8))
    assert fewer < 0.4 * first
