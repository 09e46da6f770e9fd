"""Models of a few linear blocks, trained on any plan.

train(plan, [linear] * 4, batch(8))    ─▶ an Outcome per rank
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.blocks.block_builders import Blocks

from ..helpers.training import Outcome, random_batch, train_ranks
from .toys import sgd

WIDTH = 6


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, float64."""
    inputs, targets = random_batch(0, *shape, WIDTH)
    return inputs, targets


def squared_sum(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(output.numel())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


SETTINGS = ("tied", "bucket_mb", "wire")


def train(
    plan: qs.Plan, blocks: Blocks | Callable[[], Blocks], data: tuple[Tensor, Tensor], *, steps: int = 2, **more: Any
) -> list[Outcome]:
    """Train in process; returns each rank's losses and weights. `more` are settings of the engine, and extras."""
    settings = {name: more.pop(name) for name in SETTINGS if name in more}
    own = blocks() if callable(blocks) else blocks
    return train_ranks(plan, own, squared_sum, sgd, [(*data, more)] * steps, dtype=torch.float64, **settings)
