"""Blocks and losses that differentiate in their own forward: penalties, forces, inner steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, split

from ...helpers.training import check_equality
from ..toys import adam

WIDTH, SAMPLES, STEPS = 8, 8, 2

Loss = Callable[[Tensor, Tensor], tuple[Tensor, float]]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Penalty(Plain):
    """Has the slope of its output as an auxiliary loss, while it trains."""

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return super().forward(x)
        x = x if x.requires_grad else x.requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y, 0.01 * slope.square().sum()


class Force(nn.Module):
    """Moves down the slope of an energy, in evaluations too, and switches on no graph for it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.energy[1].bias.sum()
        assert x.requires_grad
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return x - slope


class LooksAtData(Force):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if found.abs().sum().item() >= 0 else x


class InnerStep(Plain):
    """Takes a step of descent on its own weight first, as MAML does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(super().forward(x).square().mean(), self.up.weight, create_graph=True)
            up = nn.functional.linear(x, self.up.weight - 0.1 * slope, self.up.bias)
            return x + self.down(torch.tanh(up))


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return (output - targets).square().sum(), float(len(output))


def penalized(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    with torch.enable_grad():
        point = output if output.requires_grad else output.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(point).pow(3).sum(), point, create_graph=True)
    return (output - targets).square().sum() + slope.square().sum(), float(len(output))


CASES: dict[str, tuple[list[Callable[[], nn.Module]], Loss]] = {
    "penalty": ([Penalty, Plain], squares),
    "force": ([Plain, Force], squares),
    "looks at data": ([LooksAtData, Plain], squares),
    "inner step": ([InnerStep, Plain], squares),
    "loss": ([Plain, Plain], penalized),
}
PLANS: dict[str, dict[str, Any]] = {
    "dp=1": {},
    "pp=2": {"recompute": 1},
    "dp=2,pp=2": {"schedule": "zb-h1", "zero": 2},
    "dp=2": {"zero": 3, "recompute": 1},
    "pp=2,tp=2": {"schedule": "zb-h1"},
}


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(STEPS, 2, SAMPLES, WIDTH, generator=random, dtype=torch.float64)
    return [(inputs, targets) for inputs, targets in drawn]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        case for case in product(CASES, PLANS) if case != ("looks at data", "pp=2,tp=2")
    ],  # proofs want shapes without data
)
def test_gradients_in_forwards_equal_one_process(name: str, mesh: str) -> None:
    blocks, loss = CASES[name]
    options = {"schedule": "1f1b", "microbatches": 2 if "dp=2" in mesh else 4, **PLANS[mesh]}
    more: dict[str, Any] = {"microbatches": 4, "evaluated": batches()[0], "bucket_mb": 0.0005}
    check_equality(qs.compile(mesh=mesh, **options), blocks * 2, loss, adam, batches(), **more)


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Force() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class SlopeOfAll(Chained):
    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return slope


def test_layers_of_a_model_may_differentiate_and_the_model_through_them_may_not() -> None:
    torch.manual_seed(0)
    model, (inputs, targets) = Chained().double(), batches()[0]
    expected = squares(model(inputs), targets)[0].item() / SAMPLES
    blocks = split(model, example=inputs[:2])
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    engine = Engine(plan, blocks, squares, adam, transport=None)
    assert abs(engine.evaluate(inputs, targets).loss.item() - expected) <= 1e-12
    assert abs(engine.step(inputs, targets).loss.item() - expected) <= 1e-12
    with pytest.raises(MisfitError, match=r"SlopeOfAll differentiates through its layers .* let one block have"):
        split(SlopeOfAll().double(), example=inputs[:2])


class AsksForGrad(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, y.square().sum()) if torch.is_grad_enabled() else y


def test_what_recomputed_blocks_give_may_not_depend_on_whether_gradients_are_recorded() -> None:
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2, recompute=1)
    engine = Engine(plan, [AsksForGrad], squares, adam, dtype=torch.float64)
    with pytest.raises(MisfitError, match=r"gave 1 tensors at first, and 2 when run again .* ask self\.training"):
        engine.step(*batches()[0])
