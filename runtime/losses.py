"""Losses and metrics as sums over the real samples, with their weight.

Means of means go wrong as soon as a batch is padded or shared out unevenly, so nothing here divides: the engine
adds up sums and weights over microbatches and ranks, and divides once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import IGNORED_TARGET


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropies of the real samples added up, and how many those are; both are 0-dimensional.

    `logits` (…, K), `targets` int64 (…), where IGNORED_TARGET marks padding. At least float32, also for bf16 logits.
    """
    logits = logits.to(_at_least_float32(logits))
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return losses, (targets != IGNORED_TARGET).sum().to(logits.dtype)


def correct_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return how many of the real samples are predicted right: 0-dimensional, at least float32.

    `logits` (…, K), `targets` int64 (…); no prediction equals IGNORED_TARGET, so padding never counts.
    """
    return (logits.argmax(-1) == targets).sum().to(_at_least_float32(logits))


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    """Return the type to add up in: bf16 cannot count beyond 256."""
    return torch.promote_types(tensor.dtype, torch.float32)
