"""The ground under everything: a distributed run gives the numbers of the same model in one process."""

import pytest
import torch

import quintsched as qs

from ..helpers.training import require_same_bits
from .toys import Task, tiny_vit, train_on, train_plainly, worst_difference

MESHES = ["dp=2", "tp=2", "pp=2", "dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2", "pp=4"]
STEPS = 20


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)]
)
def test_20_steps_equal_one_process(mesh: str, dtype: torch.dtype, tolerance: float) -> None:
    task, blocks = Task.make(STEPS, 8, dtype), tiny_vit()
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2 if "dp=2" in mesh else 4)
    outcomes = train_on(plan, task, blocks, clip=1.0)
    assert worst_difference(outcomes, train_plainly(task, blocks, 4, clip=1.0)) <= tolerance


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("pp", [2, 4])
def test_pipeline_alone_is_bit_equal(schedule: str, pp: int) -> None:
    task, blocks = Task.make(STEPS, 8, torch.float32), tiny_vit(depth=6)
    outcomes = train_on(qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=4), task, blocks)
    expected = train_plainly(task, blocks, 4)
    assert all(of_rank.losses == pytest.approx(expected.losses, rel=1e-6) for of_rank in outcomes)
    require_same_bits(outcomes, expected)
