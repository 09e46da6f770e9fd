"""Weights in bf16 with float32 masters, bitwise equal to one process that does the same; complex weights."""

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs

from ...helpers.blocks import of_kind
from ...helpers.training import (
    adamw,
    check_equality,
    random_batch,
    require_same_bits,
    squares,
    train_alone,
    train_ranks,
)
from ..toys import Task, adam, tiny_vit

STEPS = 5


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    losses = nn.functional.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
    return losses, float((targets != -100).sum())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_bf16_pipelines_are_bit_equal_to_one_process(schedule: str) -> None:
    given = tiny_vit(), loss_of, adam, Task.make(STEPS, 8, torch.bfloat16).batches
    plan = qs.compile(schedule, mesh="pp=2", microbatches=4)
    ranks = train_ranks(plan, *given, dtype=torch.bfloat16, masters=True)
    require_same_bits(ranks, train_alone(*given, microbatches=4, dtype=torch.bfloat16, low=True))


WIDTH = 6


class Fourier(nn.Module):
    """Has complex weights, some of which are in no use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))
        self.real = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128))


There = of_kind(Fourier, lambda self, x: torch.fft.rfft(self.real(x)) * self.weight)
Back = of_kind(Fourier, lambda self, z: self.real(torch.fft.irfft(z * self.weight, n=WIDTH)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "zero", "clip"),
    [("pp=2", 0, 0.1), ("dp=2", 0, 0.1), ("dp=2", 1, 0.1), ("dp=2", 2, None), ("dp=2,pp=2", 3, 0.1)],
)
def test_trains_as_one_process_does(mesh: str, zero: int, clip: float | None) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)
    batches = [random_batch(seed, 8, WIDTH) for seed in range(3)]
    check_equality(plan, [There, Back], squares, adamw, batches, clip=clip)
