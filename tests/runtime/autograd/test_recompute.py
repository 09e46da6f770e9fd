"""Recomputation: the same bits, less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
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
