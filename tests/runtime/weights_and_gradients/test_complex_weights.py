"""Complex weights, as of Fourier layers, are trained as in one process, beside real ones and unused ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs

from ...helpers.training import check_equality

WIDTH = 6


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))
        self.real = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.real(x)) * self.weight, n=WIDTH)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return (output - targets).square().sum(), float(len(output))


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, 8, WIDTH, generator=random, dtype=torch.float64)) for _ in range(3)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mesh", "zero", "clip"),
    [("pp=2", 0, 0.1), ("dp=2", 0, 0.1), ("dp=2", 1, 0.1), ("dp=2", 2, None), ("dp=2,pp=2", 3, 0.1)],
)
def test_trains_as_one_process_does(mesh: str, zero: int, clip: float | None) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)
    check_equality(plan, [Fourier, Fourier], loss, adamw, batches(), clip=clip)
