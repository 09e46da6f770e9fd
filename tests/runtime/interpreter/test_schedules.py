"""Schedules with split backwards and twins give the numbers of one process too."""

from __future__ import annotations

import pytest
import torch

import quintsched as qs

from ..toys import Task, tiny_vit, train_on, train_plainly, worst_difference

BLOCKS = tiny_vit(depth=6)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("schedule", [s.name for s in qs.all_schedules() if s.mode == "train" and s.max_slices == 1])
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,pp=2,tp=2"])
def test_every_schedule_equals_one_process(schedule: str, mesh: str) -> None:
    task = Task.make(3, 16, torch.float64)
    plan = qs.compile(schedule, mesh=mesh, microbatches=4)
    microbatches = 4 * plan.mesh.axis_size("dp")
    outcomes = train_on(plan, task, BLOCKS, clip=1.0, bucket_mb=0.002)
    assert worst_difference(outcomes, train_plainly(task, BLOCKS, microbatches, clip=1.0)) <= 1e-12


def test_both_halves_of_a_backward_add_up_to_the_whole() -> None:
    task = Task.make(3, 8, torch.float32)
    outcomes = train_on(qs.compile("zb-h1", mesh="pp=4", microbatches=4), task, BLOCKS)
    expected = train_plainly(task, BLOCKS, 4)
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, expected.weights[name]), name
