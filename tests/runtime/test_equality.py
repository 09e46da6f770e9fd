"""The ground under everything: a distributed run gives the numbers of the same model in one process."""

import pytest
import torch

import quintsched as qs

from .toys import Task, adam, tiny_vit, train_on, train_plainly, worst_difference

MESHES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 4)]
STEPS = 20


def mesh_of(dp: int, tp: int, pp: int) -> qs.Mesh:
    return qs.Mesh(dp=dp, pp=pp, tp=tp)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("dp", "tp", "pp"), MESHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)]
)
def test_20_steps_equal_one_process(dp: int, tp: int, pp: int, dtype: torch.dtype, tolerance: float) -> None:
    task, blocks = Task.make(STEPS, 8, dtype), tiny_vit()
    plan = qs.compile("1f1b", mesh=mesh_of(dp, tp, pp), microbatches=4 // dp)
    outcomes = train_on(plan, task, blocks, clip=1.0)
    assert worst_difference(outcomes, train_plainly(task, blocks, 4, clip=1.0)) <= tolerance


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("pp", [2, 4])
def test_pipeline_alone_is_bit_equal(schedule: str, pp: int) -> None:
    task, blocks = Task.make(STEPS, 8, torch.float32), tiny_vit(depth=6)
    outcomes = train_on(qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=4), task, blocks)
    expected = train_plainly(task, blocks, 4)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, expected.weights[name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "axes"), [("interleaved-1f1b", "tp=2,dp=2,pp=2"), ("gpipe", "pp=2,tp=2,dp=2")])
def test_other_schedules_and_orders_of_axes(schedule: str, axes: str) -> None:
    task, blocks = Task.make(5, 8, torch.float64), tiny_vit()
    outcomes = train_on(qs.compile(schedule, mesh=axes, microbatches=2), task, blocks, clip=0.5)
    assert worst_difference(outcomes, train_plainly(task, blocks, 4, clip=0.5)) <= 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 1, 1), (1, 2, 2), (2, 2, 2)])
def test_losses_with_adam(dp: int, tp: int, pp: int) -> None:
    task, blocks = Task.make(STEPS, 8, torch.float32), tiny_vit()
    plan = qs.compile("1f1b", mesh=mesh_of(dp, tp, pp), microbatches=4 // dp)
    expected = train_plainly(task, blocks, 4, optimizer=adam)
    for outcome in train_on(plan, task, blocks, optimizer=adam):
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-4)


@pytest.mark.parametrize("buckets_per_stage", [1, 3])
def test_gradients_in_many_pieces(buckets_per_stage: int) -> None:
    task, blocks = Task.make(3, 8, torch.float64), tiny_vit()
    plan = qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=2, buckets_per_stage=buckets_per_stage)
    outcomes = train_on(plan, task, blocks, clip=1.0, bucket_mb=0.002)
    assert worst_difference(outcomes, train_plainly(task, blocks, 4, clip=1.0)) <= 1e-12


def test_fewer_microbatches_than_ranks() -> None:
    task, blocks = Task.make(3, 8, torch.float64), tiny_vit()
    outcomes = train_on(qs.compile("1f1b", mesh="pp=4", microbatches=2), task, blocks)
    assert worst_difference(outcomes, train_plainly(task, blocks, 2)) <= 1e-12
