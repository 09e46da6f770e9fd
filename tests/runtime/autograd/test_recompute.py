"""Recomputation: the same bits, less memory; blocks that give other numbers when they are run again are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local

from ...helpers.training import Outcome, require_same_bits, train_ranks
from ..toys import sgd


class Noisy(nn.Module):
    """Drops out, and has an auxiliary loss: what a second forward must repeat, and must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.dropout(self.layer(x), 0.5, True)
        return h, 0.1 * h.square().mean()


def outcomes(request_of: dict[str, Any], blocks: list[Any], batches: list[Any]) -> list[list[Outcome]]:
    plans = (qs.compile("1f1b", **request_of, recompute=recompute) for recompute in (0, 1))
    around = partial(torch.random.fork_rng, devices=[])
    return [train_ranks(plan, blocks, nn.functional.mse_loss, sgd, batches, around=around) for plan in plans]


def test_random_masks_and_auxiliary_losses_are_those_of_the_forward() -> None:
    kept, again = outcomes({"mesh": "pp=1", "microbatches": 2}, [Noisy] * 3, [tuple(torch.randn(2, 8, 8))] * 3)
    assert kept[0].losses == again[0].losses
    require_same_bits(again, kept)


class Scaled(nn.Linear):
    """Scales the gradient of what it is given, by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.3)
        return super().forward(x).tanh()


def test_a_hook_on_what_a_block_is_given_is_called_once() -> None:
    blocks, x = [Scaled(4, 4, dtype=torch.float64) for _ in range(4)], torch.ones(8, 4, dtype=torch.float64)
    kept, again = outcomes({"mesh": "pp=2", "microbatches": 4}, blocks, [(x, x)])
    require_same_bits(again, kept)


def test_what_is_recomputed_does_not_stand() -> None:
    inputs, targets = torch.randn(64, 32), torch.randn(64, 32)

    def peaks(recompute: int) -> list[int]:
        plan = qs.compile("gpipe", mesh="pp=2", microbatches=8, recompute=recompute)

        def run(transport: Transport) -> int:
            blocks = [lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())] * 4
            engine = Engine(plan, blocks, nn.functional.mse_loss, sgd, transport=transport)
            return engine.step_counting_saved(inputs, targets)[1].peak

        return run_local(2, run)

    kept, dropped = peaks(0), peaks(1)
    assert all(less <= 0.5 * more for less, more in zip(dropped, kept, strict=True))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.linear(x) * (1 + 0.1 * self.count)
        return out


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class Nested(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.linear, self.drop, self.checkpoints = nn.Linear(4, 4), nn.Dropout(0.5), checkpoints

    def inner(self, x):
        return self.drop(self.linear(x))

    def outer(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)

    def forward(self, x):
        return checkpoint(self.outer, x, use_reentrant=True) if self.checkpoints else self.inner(x)


def train(blocks: list[nn.Module], mesh: str, recompute: int) -> list[float]:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, recompute=recompute)

    def rank(transport: Transport) -> list[float]:
        engine = Engine(plan, blocks, F.mse_loss, sgd, transport=transport)
        data = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(0))
        return [float(engine.step(*both).loss) for both in data]

    return run_local(plan.mesh.size, rank)[0]


@pytest.mark.parametrize(
    "block",
    [Counting, lambda: Asking(4, 4), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))],
    ids=["counter", "grad mode", "spectral norm"],
)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_blocks_that_are_others_when_run_again_are_refused(block, mesh) -> None:
    with pytest.raises(MisfitError, match=r"gave other numbers when run again .* compile the plan with recompute=0"):
        train([block(), block()], mesh, 1)


def test_dropouts_in_checkpoints_within_checkpoints_draw_what_they_drew() -> None:
    def losses(mesh, checkpoints):
        torch.manual_seed(0)
        return train([nn.Linear(4, 4), *(Nested(checkpoints) for _ in range(2))], mesh, int(checkpoints))

    expected = losses("dp=1", False)
    assert losses("pp=2", True) == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == 3
