"""Matmul of a column-parallel layer with the communication of its input, overlapped with computation.

    entry     forward                                 backward
    copy      the input is on all ranks               gradients are all-reduced
    gather    all-gather of the ranks' tokens         gradients are reduce-scattered to each rank's tokens
    none      the caller communicates                 gradients stay partial sums

In the backward the collective on the input's gradient runs while the weight's gradient is computed. Gathered tokens are
not saved: they are gathered again, while the input's gradient is computed (Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2).

    time ─▶   gather x ·········                  ▷ collective  · in flight
              g W ────────  reduce ·············
                            gᵀ x ─────────  wait

Several columns of one module with the same input (separate queries, keys and values) communicate it once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled
from torch.nn import functional

from ...autograd.deferred_weight_grads import bias_gradient, defer, linear, weight_gradient
from ...blocks.block_builders import TOKENS_DIM
from ...comm import Group
from ...comm.autograd_collectives import (
    all_gather,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce_scatter,
    copy_to_group,
    outside_compiled,
    reduce_from_group,
    reduce_scatter,
)
from ..mesh_independent_dropout import ColumnRowPair

InputCommunication = Literal["copy", "gather", "none"]
"""Communication of a column layer's input; see the module."""


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    entry: InputCommunication,
    pair: ColumnRowPair | None = None,
) -> Tensor:
    """Return `x` times this rank's columns: (…, in) to (…, out / size), for all ranks' tokens if these are gathered.

    `pair` is given where a row layer follows; it caches the input for other columns that take the same one.
    """
    return _aside(x, weight, bias, group, entry, pair)


def _column_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, entry: InputCommunication, pair: ColumnRowPair | None
) -> Tensor:
    if pair is not None and pair.columns > 1:
        return linear(pair.enter(x, partial(_enter, group, entry)), weight, bias)
    if group.size == 1 or entry == "none" or not _is_plain(x, weight):
        return linear(_enter(group, entry, x), weight, bias)
    rows: Tensor = _ColumnProduct.apply(x, weight, bias, group, entry)  # type: ignore[no-untyped-call]
    shape = [*x.shape[:-1], weight.shape[0]]
    if entry == "gather":
        shape[TOKENS_DIM] *= group.size
    return rows.view(shape)


_aside: Callable[[Tensor, Tensor, Tensor | None, Group, InputCommunication, ColumnRowPair | None], Tensor] = (
    outside_compiled(_column_product)
)
"""`_column_product` outside of compiled code: ranks must issue the same collectives whether they compile or not."""


def _enter(group: Group, entry: InputCommunication, x: Tensor) -> Tensor:
    match entry:
        case "copy":
            return copy_to_group(x, group)
        case "gather":
            return all_gather(x, group, TOKENS_DIM)
        case "none":
            return x


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether the overlapped backward applies: grad mode on, no autocast or functorch transform, one dtype."""
    is_recorded = torch.is_grad_enabled() and weight.requires_grad and not x.is_meta
    is_bare = not _is_any_autocast_enabled() and not _are_functorch_transforms_active()
    return is_recorded and is_bare and x.dtype is weight.dtype


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, entry: InputCommunication
    ) -> Tensor:
        ctx.bias, ctx.group, ctx.gathers = bias, group, entry == "gather"
        ctx.save_for_backward(x, weight)
        whole = begin_all_gather(x, group, TOKENS_DIM).wait_result() if ctx.gathers else x
        ctx.shape = whole.shape
        return functional.linear(
            whole.reshape(-1, whole.shape[-1]), weight, bias
        )  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            return _recorded_backward(ctx, gradient)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        coming = begin_all_gather(x, ctx.group, TOKENS_DIM) if ctx.gathers and needs_weight else None
        going = None
        if needs_x:
            of_x = gradient.mm(weight).view(ctx.shape)
            going = (
                begin_reduce_scatter(of_x, ctx.group, TOKENS_DIM) if ctx.gathers else begin_all_reduce(of_x, ctx.group)
            )
        of_weight = of_bias = None
        if needs_weight:
            given = (x if coming is None else coming.wait_result()).reshape(-1, x.shape[-1])
            of_weight = None if defer(weight, weight_gradient, (gradient, given)) else weight_gradient(gradient, given)
        if needs_bias:
            of_bias = None if defer(ctx.bias, bias_gradient, (gradient,)) else bias_gradient(gradient)
        return None if going is None else going.wait_result(), of_weight, of_bias, None, None


def _recorded_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
    """Compute the same gradients by differentiable operations, for double backward, without overlap."""
    x, weight = ctx.saved_tensors
    of_x = gradient.mm(weight).view(ctx.shape)
    of_x = reduce_scatter(of_x, ctx.group, TOKENS_DIM) if ctx.gathers else reduce_from_group(of_x, ctx.group)
    entered = _enter(ctx.group, "gather" if ctx.gathers else "copy", x)
    of_weight = weight_gradient(gradient, entered.reshape(-1, x.shape[-1]))
    return of_x, of_weight, None if ctx.bias is None else bias_gradient(gradient), None, None
