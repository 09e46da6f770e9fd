"""Optimizers and learning-rate schedules of a job file: torch's own optimizers, and factors as a pure function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..settings.job import LearningRateConfig, OptimizerConfig

_OPTIMIZERS: Mapping[str, tuple[Callable[..., Optimizer], str]] = {
    "sgd": (torch.optim.SGD, "momentum"),
    "adam": (torch.optim.Adam, "betas"),
    "adamw": (torch.optim.AdamW, "betas"),
}
"""By name: the class, and the argument that it alone takes."""

_SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""By name: the factor, from 1 to 0, after a fraction of the decay phase."""


def build_optimizer(
    config: OptimizerConfig,
    params: Iterable[nn.Parameter] | Iterable[tuple[str, Tensor]],
    undecayed: Collection[str] = (),
) -> Optimizer:
    """Return torch's optimizer over `params`, plain or named, updating all of them in few kernels (`foreach`).

    Weight decay spares the named parameters in `undecayed`.
    """
    kind, own = _OPTIMIZERS[config.name]
    more = {own: getattr(config, own)}
    decay = config.weight_decay
    return kind(_decay_groups(params, undecayed), lr=config.lr, weight_decay=decay, foreach=True, **more)


def _decay_groups(
    params: Iterable[nn.Parameter] | Iterable[tuple[str, Tensor]], undecayed: Collection[str]
) -> list[dict[str, Any]]:
    """Return torch's parameter groups with and without weight decay; none is empty."""
    given = list(params)
    spared = [param for param in given if isinstance(param, tuple) and param[0] in undecayed]
    others = [param for param in given if not isinstance(param, tuple) or param[0] not in undecayed]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate_factor(schedule: LearningRateConfig, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in `step` (from 0) of `total_steps`.

    It rises over `warmup_steps`, reaching 1 in the last of them, and then stays, or falls to `min_factor`, which the
    step after the last one would have:

        1 ┤   ╭──╮            cosine; linear falls in a straight line
          │  ╱    ╲
          │ ╱      ╲__ min_factor
          └─┴──┴──────┴▶ step
            warmup    total_steps
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    return schedule.min_factor + (1 - schedule.min_factor) * _SHAPES[schedule.name](progress)
