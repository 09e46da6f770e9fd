"""Recomputation: the same bits, less memory."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local

from ..toys import Task, sgd, tiny_vit, train_on


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipe"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputing_changes_no_bit(schedule: str, every: int) -> None:
    task, blocks = Task.make(3, 8, torch.float32), tiny_vit(depth=6)
    kept = train_on(qs.compile(schedule, mesh="pp=2", microbatches=4), task, blocks, clip=1.0)
    plan = qs.compile(schedule, mesh="pp=2", microbatches=4, recompute=every)
    for again, before in zip(train_on(plan, task, blocks, clip=1.0), kept, strict=True):
        assert again.losses == before.losses
        assert all(torch.equal(weight, before.weights[name]) for name, weight in again.weights.items())


class Noisy(nn.Module):
    """Drops out, and has an auxiliary loss: what a second forward must repeat, and must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.dropout(self.layer(x), 0.5, True)
        return h, 0.1 * h.square().mean()


def test_random_masks_and_auxiliary_losses_are_those_of_the_forward() -> None:
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)

    def weights(recompute: int) -> tuple[float, dict[str, Tensor]]:
        plan = qs.compile("1f1b", mesh="pp=1", microbatches=2, recompute=recompute)
        engine = Engine(plan, [Noisy, Noisy, Noisy], nn.functional.mse_loss, sgd)
        torch.manual_seed(7)
        losses = [engine.step(inputs, targets).loss.item() for _ in range(3)]
        return sum(losses), engine.full_weights()

    (loss, kept), (again_loss, again) = weights(0), weights(1)
    assert loss == again_loss
    assert all(torch.equal(weight, kept[name]) for name, weight in again.items())


class Scaled(nn.Linear):
    """Scales the gradient of what it is given, by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.3)
        return super().forward(x).tanh()


def test_a_hook_on_what_a_block_is_given_is_called_once() -> None:
    blocks, task = [Scaled(4, 4, dtype=torch.float64) for _ in range(4)], torch.ones(8, 4, dtype=torch.float64)

    def trained(recompute: int) -> list[dict[str, Tensor]]:
        plan = qs.compile("1f1b", mesh="pp=2", microbatches=4, recompute=recompute)

        def run(transport: Transport) -> dict[str, Tensor]:
            engine = Engine(plan, deepcopy(blocks), nn.functional.mse_loss, sgd, transport=transport)
            engine.step(task, task)
            return engine.full_weights()

        return run_local(2, run)

    for again, kept in zip(trained(1), trained(0), strict=True):
        assert all(torch.equal(weight, kept[name]) for name, weight in again.items())


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
