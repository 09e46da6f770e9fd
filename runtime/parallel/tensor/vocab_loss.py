"""Vocabulary-parallel cross entropy: logits stay sharded over the vocabulary, and no rank has all of them.

    rank 0   logits of ids 0 … V/n-1    ─┐   per token: maximum, sum of exponentials, and the target's logit,
    rank 1   logits of ids V/n … 2V/n-1 ─┤              each all-reduced as one number
    …                                   ─┘

    loss = log Σ exp(z - max) - (z_target - max)           local gradient: softmax of the local ids - 1 at the target

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import Group, ReduceOp
from ...user_objects.library_or_user import arguments_of


def cut_cross_entropy(logits: Tensor, targets: Tensor, ignored: int, group: Group) -> Tensor:
    """Return each token's cross entropy, the same on all ranks of the group: (tokens,), zero where ignored.

    Args:
        logits: those of this rank's ids (tokens, V / size), contiguous ranges of ids in rank order.
        targets: int64 (tokens,), ids of the whole vocabulary.
        ignored: the target of a token that does not count (ignore_index).
        group: the ranks over which the vocabulary is cut; all of them call this.

    Raises:
        RuntimeError: a target that is not an id, on every rank (on CUDA: a device-side assertion).
    """
    return cut_losses(logits, targets, ignored, group)[0]


def cut_losses(logits: Tensor, targets: Tensor, ignored: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return each token's cross entropy, as `cut_cross_entropy`, and log(sum(exp(logits))): (tokens,) each."""
    losses: Tensor
    normalizers: Tensor
    losses, normalizers = _CutCrossEntropy.apply(logits, targets, ignored, group)  # type: ignore[no-untyped-call]
    return losses, normalizers


def cut_argmax(logits: Tensor, group: Group) -> Tensor:
    """Return the id with the largest logit (the lowest of equals) on all ranks: (…, V / size) to int64 (…)."""
    best, local = logits.max(-1)
    highest = _over(best.clone(), group, ReduceOp.MAX)
    here = local + group.index * logits.shape[-1]
    none = torch.full_like(here, logits.shape[-1] * group.size)
    return _over(torch.where(best == highest, here, none), group, ReduceOp.MIN)


def takes_vocabulary(function: Callable[..., object]) -> bool:
    """Whether a loss or metric supports sharded logits: it has a parameter `vocabulary` in a readable signature."""
    try:
        return "vocabulary" in arguments_of(function)
    except ValueError:
        return False


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, group: Group) -> tuple[Tensor, Tensor]:
        count = logits.shape[-1]
        highest = _over(logits.amax(-1), group, ReduceOp.MAX)
        exponentials = (logits - highest[:, None]).exp_()
        counts = targets != ignored
        local = targets - group.index * count
        is_here = (local >= 0) & (local < count) & counts
        # Targets that are no ids stay out of range, so that gather itself raises.
        is_elsewhere = ~is_here & (targets >= 0) & (targets < count * group.size)
        places = local.masked_fill(is_elsewhere | ~counts, 0)[:, None]
        of_target = (logits.gather(1, places)[:, 0] - highest).where(is_here, 0)
        sums = _over(torch.stack((exponentials.sum(-1), of_target)), group, ReduceOp.SUM)
        ctx.save_for_backward(exponentials.div_(sums[0, :, None]), places, is_here, counts)
        logs = sums[0].log()
        return (logs - sums[1]).where(counts, 0), logs + highest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_normalizers: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, places, is_here, counts = ctx.saved_tensors
        of_logits = softmax * (gradient.where(counts, 0) + of_normalizers)[:, None]
        of_target = -gradient.where(is_here, 0)[:, None]
        return of_logits.scatter_add_(1, places, of_target), None, None, None


def _over(tensor: Tensor, group: Group, op: ReduceOp) -> Tensor:
    """All-reduce a tensor over the group, in place, and return it."""
    group.all_reduce(tensor, op).wait()
    return tensor
