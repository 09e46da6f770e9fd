"""Losses whose gradients are not proportional to the weight of a microbatch: clamps, signs, hooks in their graph.

loss of microbatch i, times its weight ──▶ backward ──▶ w · g      linear: that of the batch, once all are added up
                                                   └──▶ clamp(w · g)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

CHANGES_GRADIENTS = (
    "its backward changes gradients by more than a factor, as a clamp or a sign does, or a hook in it: these are "
    "a microbatch's, and not the batch's; clip in the optimizer, Engine(…, clip=…)"
)
FACTORS, _PROPORTION = (2.0**-10, 2.0**10), {torch.float64: 1e-9, torch.float32: 1e-3}
"""Factors for the gradient of a loss; relative tolerance of the output's gradient, by dtype."""


def gradients_of(value: Tensor, wanted: Sequence[Tensor], scale: float = 1.0) -> Sequence[Tensor | None]:
    """Return the gradients of a loss, times a scale; its graph is kept."""
    return torch.autograd.grad(value, wanted, torch.full_like(value, scale), retain_graph=True, allow_unused=True)


def is_linear(value: Tensor, wanted: Sequence[Tensor], found: Sequence[Tensor | None], factor: float) -> bool:
    """Return whether gradients are proportional to that of the loss; gradients that are not finite decide nothing."""
    for one, other in zip(found, gradients_of(value, wanted, factor) if found else (), strict=True):
        if one is not None and other is not None:
            off, size = float((other / factor - one).abs().amax()), float(one.abs().amax())
            if isfinite(off) and off > _PROPORTION.get(one.dtype, 3e-2) * size + 1e-30:
                return False
    return True
