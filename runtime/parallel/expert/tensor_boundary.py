"""How tokens reach the experts where tensor parallelism cuts those, and how what experts make of them leaves.

                                router ──▶ weights ─▷ copy ──────┐
    tokens ─▷ gather or copy ─┤                                  ├─ weighed and added up ─▷ sum or scatter ──▶ tokens
                                all-to-all ─▶ partial sums ──────┘

The experts' columns and rows would each copy and sum for themselves, once per expert; the boundary does it for all of
them at once. On the way to the router all ranks have the same tokens and the same gradients; on the way to the experts
each rank's gradient is a partial sum. Where each rank has a slice of the tokens (`sequence_parallel`), both ways begin
with one gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...blocks.blocks import TOKENS
from ...comm import Group
from ...comm.autograd_collectives import (
    begin_all_gather,
    begin_reduce_scatter,
    copy_to_group,
    gather_from_group,
    outside_compiled,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
)


class TensorBoundary:
    """Where tokens enter and leave one mixture of experts.

    Args:
        group: the ranks of tp.
        cut: whether each rank has a shard of every expert, whose results are to be summed.
        sliced: whether each rank has a slice of the tokens.
    """

    def __init__(self, group: Group, *, cut: bool, sliced: bool) -> None:
        self._group, self._cut, self._sliced = group, cut, sliced

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return all tokens (samples, tokens, …), for the router and for the experts."""
        if not self._sliced:
            return tokens, copy_to_group(tokens, self._group) if self._cut else tokens
        if not self._cut:
            whole = gather_from_group(tokens, self._group, TOKENS)
            return whole, whole
        return _gather_aside(tokens, self._group)

    def weights(self, weights: Tensor) -> Tensor:
        """Return what the experts' results are weighed with, the same on all ranks."""
        return copy_to_group(weights, self._group) if self._cut else weights

    def leave(self, mixed: Tensor) -> Tensor:
        """Return what becomes of the weighed results: (samples, tokens, …), or this rank's slice of the tokens."""
        if not self._sliced:
            return reduce_from_group(mixed, self._group) if self._cut else mixed
        leave = reduce_scatter if self._cut else scatter_to_group
        return leave(mixed, self._group, TOKENS)


class _GatherForBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        ctx.group = group
        whole = begin_all_gather(tokens, group, TOKENS).wait()
        return whole, whole.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_seen: Tensor, of_taken: Tensor) -> tuple[Tensor, None]:
        coming = begin_reduce_scatter(of_taken, ctx.group, TOKENS)
        mine = of_seen.chunk(ctx.group.size, TOKENS)[ctx.group.index]
        return coming.wait() + mine, None


def _gather_for_both(tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    seen, taken = _GatherForBoth.apply(tokens, group)  # type: ignore[no-untyped-call]
    return seen, taken


_gather_aside: Callable[[Tensor, Group], tuple[Tensor, Tensor]] = outside_compiled(_gather_for_both)
"""Outside of compiled code, as all collectives (see `collectives`)."""
