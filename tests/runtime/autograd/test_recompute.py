"""Recomputation has the same bits and less memory; blocks and losses may differentiate in their own forwards."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.random import fork_rng

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import split

from ...helpers.blocks import of_kind
from ...helpers.training import check_equality, random_batch, require_same_bits, squares, train_ranks
from ..toys import adam, sgd


class Scaled(nn.Linear):
    """Scales the gradient of what it is given, by a hook: it is called once."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.3)
        return super().forward(x).tanh()


def test_hooks_are_called_once() -> None:
    batches = [tuple(torch.randn(2, 8, 4))] * 3
    chosen: list[dict[str, Any]] = [{}, {"recompute": 1}]
    chosen += [{"recompute": every, "recompute_microbatches": "1"} for every in (1, 2)]
    plans = (qs.compile("1f1b", mesh="pp=2", microbatches=2, **more) for more in chosen)
    kept, *others = (train_ranks(plan, [partial(Scaled, 4, 4)] * 4, F.mse_loss, sgd, batches) for plan in plans)
    for again in others:
        assert kept[0].losses == again[0].losses
        require_same_bits(again, kept)


class Late(nn.Linear):
    """Begins to draw when the loop says so; in that one step, its draws have no seed of their own."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(super().forward(x), 0.5, self.draws)


def begin_to_draw(blocks: Any, step: int) -> None:
    for block in blocks:
        block.draws = step >= 2


def test_blocks_that_begin_to_draw_draw_the_same_when_run_again() -> None:
    blocks, how = [Late(4, 4), Late(4, 4)], {"before": begin_to_draw, "around": partial(fork_rng, devices=[])}
    assert train(blocks, "dp=1", 1, **how) == train(blocks, "dp=1", 0, **how)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * (1 + 0.1 * self.count)


Asking = of_kind(nn.Linear, lambda self, x: nn.Linear.forward(self, x) * (2 if torch.is_grad_enabled() else 1))


class AsksForGrad(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, y.square().mean()) if torch.is_grad_enabled() else y


def train(blocks: list[nn.Module], mesh: str, recompute: int, **more: Any) -> list[float]:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, recompute=recompute)
    data = torch.randn(4, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    return train_ranks(plan, blocks, F.mse_loss, sgd, [tuple(both) for both in data], **more)[0].losses


OTHER_NUMBERS = "gave other numbers when run again .* compile the plan with recompute=0"


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (Counting, OTHER_NUMBERS),
        (lambda: Asking(4, 4), OTHER_NUMBERS),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), OTHER_NUMBERS),
        (lambda: AsksForGrad(4, 4), r"gave 1 tensors at first, and 2 when run again .* ask self\.training"),
    ],
    ids=["counter", "grad mode", "spectral norm", "an output by the grad mode"],
)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_blocks_that_are_others_when_run_again_are_refused(block, says, mesh) -> None:
    with pytest.raises(MisfitError, match=says):
        train([block(), block()], mesh, 1)


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


LooksAtData = of_kind(Force, lambda self, x: Force.forward(self, x) if x.detach().abs().sum().item() >= 0 else x)


class InnerStep(Plain):
    """Takes a step of descent on its own weight first, as MAML does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(super().forward(x).square().mean(), self.up.weight, create_graph=True)
            up = nn.functional.linear(x, self.up.weight - 0.1 * slope, self.up.bias)
            return x + self.down(torch.tanh(up))


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


BATCHES = [random_batch(step, SAMPLES, WIDTH) for step in range(STEPS)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [case for case in product(CASES, PLANS) if case != ("looks at data", "pp=2,tp=2")],  # proofs run without data
)
def test_gradients_in_forwards_equal_one_process(name: str, mesh: str) -> None:
    blocks, loss = CASES[name]
    options = {"schedule": "1f1b", "microbatches": 2 if "dp=2" in mesh else 4, **PLANS[mesh]}
    more: dict[str, Any] = {"microbatches": 4, "evaluated": BATCHES[0], "bucket_mb": 0.0005}
    check_equality(qs.compile(mesh=mesh, **options), blocks * 2, loss, adam, BATCHES, **more)


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
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    check_equality(plan, Chained().double(), squares, adam, BATCHES, microbatches=2, evaluated=BATCHES[0])
    with pytest.raises(MisfitError, match=r"SlopeOfAll differentiates through its layers .* let one block have"):
        split(SlopeOfAll().double(), example=BATCHES[0][0])
