"""Synchronised batch norm: statistics over all replicas, as in SyncBatchNorm.

    replica 0   x (n₀, C, …) ─▶ Σ x, n ─┐
                                        ├─ all-reduce ─▶ mean ─▶ Σ (x - mean)² ─ all-reduce ─▶ variance ─▶ y
    replica 1   x (n₁, C, …) ─▶ Σ x, n ─┘

Forward and backward are those of one process whose microbatch is the union of the replicas' microbatches of the same
number; running statistics become the same everywhere. Over cp these are the slices of the same sequences.

Implemented as a torch function mode over `torch.nn.functional.batch_norm`, which batch norms of all libraries call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ..autograd.engine_owned_layers import TakenOver
from ..comm import Group
from ..comm.autograd_collectives import copy_to_group, reduce_from_group


class SyncedNorms(TorchFunctionMode):
    """Torch function mode in which batch norms in training share their statistics over the ranks of a group."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.batch_norm:
            return _batch_norm(self._group, func, *args, **given)
        return func(*args, **given)


def _batch_norm(
    group: Group,
    plain: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or input.is_meta:
        return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input.float() if input.dtype.itemsize < 4 else input
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    counted = torch.cat([x.sum(dims), x.new_tensor([x.numel() / max(x.shape[1], 1)])])
    total = _sum(counted, group)
    seen = total[-1].detach()
    count = seen.clamp(min=1)  # no samples on any replica: no update
    mean = total[:-1] / count
    centred = x - mean.view(shape)
    variance = _sum(centred.square().sum(dims), group) / count
    found = centred * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        found = found * weight.view(shape)
    if bias is not None:
        found = found + bias.view(shape)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            learnt = momentum * (seen > 0).to(running_mean.dtype)
            running_mean.lerp_(mean.to(running_mean.dtype), learnt)
            running_var.lerp_((variance * (count / (count - 1).clamp(min=1))).to(running_var.dtype), learnt)
    return found.to(input.dtype)


def _sum(x: Tensor, group: Group) -> Tensor:
    """All-reduce (sum) in the forward, and of the gradient in the backward: every rank's loss depends on the sum."""
    return copy_to_group(reduce_from_group(x, group), group)


class BareSyncBatchNorm(TakenOver, nn.SyncBatchNorm):
    """An nn.SyncBatchNorm without collectives of its own (the mode has them)."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (samples, C, …) as a plain batch norm does."""
        return _BatchNorm.forward(self, input)


def take_over_synced(block: nn.Module) -> None:
    """Replace in place the class of every nn.SyncBatchNorm of a block, so that the mode synchronises it instead."""
    for module in block.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = BareSyncBatchNorm
