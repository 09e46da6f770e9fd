"""Differentiable collectives, in pairs that are each other's backward.

    copy_to_group      identity      ◀─ backward ─▶  reduce_from_group  all-reduce
    scatter_to_group   its slice     ◀─ backward ─▶  gather_from_group  all-gather
    all_gather         all-gather    ◀─ backward ─▶  reduce_scatter     reduce-scatter
    all_to_all         all-to-all    ◀─ backward ─▶  all_to_all         all-to-all
    all_to_all_rows    rows of any number each way  ◀─ backward ─▶  the same, sent and received swapped

The first two pairs belong to the boundaries of a region where members divide the work on one tensor: outside, all
members hold the same tensor and the same gradient. The third pair is for members that hold different slices of a
tensor, and different, partial gradients of the whole. The last two exchange slices; each is its own backward.

No function mutates its argument, and all members of the group must call it. In a group of one they return the
argument. On meta tensors they compute shapes and do not communicate. Derivatives of any order work, since a backward
is itself one of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx

from quintsched.errors import MisfitError

from .transport_interface import Group, Work

Collective = Callable[[Tensor, Group, int], Tensor]

outside_compiled = _disable_dynamo
"""Excludes a function from compiled code, as `torch.compiler.disable`, the import of which takes a second."""


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return `x`; the backward sums the members' gradients. Any shape."""
    return _apply(x, group, 0, forward=_view, backward=_reduce)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the members' `x`; the backward passes the gradient on. Any shape."""
    return _apply(x, group, 0, forward=_sum, backward=_copy)


def gather_from_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the members' `x` concatenated along `dim`; the backward takes the caller's slice of the gradient."""
    return _apply(x, group, dim, forward=_join, backward=scatter_to_group)


def scatter_to_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the caller's slice of `x` along `dim`; the backward concatenates the members' gradients.

    Raises:
        MisfitError: the group's size does not divide `x.shape[dim]`.
    """
    return _apply(x, group, dim, forward=_slice, backward=gather_from_group)


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the members' `x` concatenated along `dim`; the backward reduce-scatters the gradients."""
    return _apply(x, group, dim, forward=_join, backward=reduce_scatter)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the caller's slice along `dim` of the sum of the members' `x`; the backward all-gathers the gradients.

    Raises:
        MisfitError: the group's size does not divide `x.shape[dim]`.
    """
    return _apply(x, group, dim, forward=_sum_slice, backward=all_gather)


def all_to_all(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the caller's slice along `dim` of each member's `x`, concatenated; the backward is the same exchange.

    Raises:
        MisfitError: the group's size does not divide `x.shape[dim]`.
    """
    return _apply(x, group, dim, forward=_swap, backward=all_to_all)


def all_to_all_rows(x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Return the rows that each member sends to the caller, in the order of members; the backward sends them back.

    Args:
        x: (rows, …), `sent[k]` of them for member k, in their order.
        group: the members.
        sent: rows for each member.
        received: rows from each member; the result has their sum.

    Raises:
        MisfitError: `sent` does not add up to the rows of `x`, or does not match the others' `received`.
    """

    def backward(grad: Tensor, group: Group, _dim: int) -> Tensor:
        return all_to_all_rows(grad, group, received, sent)

    def forward(x: Tensor, group: Group, _dim: int) -> Tensor:
        arrived = x.new_empty(sum(received), *x.shape[1:])
        if not x.is_meta:
            group.all_to_all(arrived, x.contiguous(), received, sent).wait()
        return arrived

    return _apply(x, group, 0, forward=forward, backward=backward)


class _Collective(torch.autograd.Function):
    """Autograd function of two collectives: `forward`, and `backward` for the gradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, group: Group, dim: int, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.way_back = (backward, group, dim)  # type: ignore[attr-defined]
        return forward(x, group, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        backward, group, dim = ctx.way_back  # type: ignore[attr-defined]
        return backward(grad, group, dim), None, None, None, None


def _apply(x: Tensor, group: Group, dim: int, *, forward: Collective, backward: Collective) -> Tensor:
    return x if group.size == 1 else _communicate_aside(x, group, dim, forward, backward)


def _communicate(x: Tensor, group: Group, dim: int, forward: Collective, backward: Collective) -> Tensor:
    result: Tensor = _Collective.apply(x, group, dim, forward, backward)  # type: ignore[no-untyped-call]
    return result


_communicate_aside: Callable[[Tensor, Group, int, Collective, Collective], Tensor] = outside_compiled(_communicate)
"""`_communicate` outside of compiled code, which cannot contain these collectives."""


class Coming:
    """A pending collective; its input is kept until the result is there."""

    def __init__(self, result: Callable[[], Tensor], given: Tensor, works: Sequence[Work]) -> None:
        self._result = result
        self._given = given
        self._works = works

    def wait_result(self) -> Tensor:
        """Return the result, once it is complete."""
        for work in self._works:
            work.wait()
        return self._result()


def begin_all_reduce(x: Tensor, group: Group) -> Coming:
    """Start to all-reduce `x`, in place where it is contiguous; no gradient flows through it."""
    total = x.contiguous()
    return Coming(lambda: total, total, () if x.is_meta else (group.all_reduce(total),))


def begin_all_gather(x: Tensor, group: Group, dim: int) -> Coming:
    """Start to all-gather `x` along `dim`; no gradient flows through it."""
    joined, given = x.new_empty(group.size, *x.shape), x.contiguous()
    works = () if x.is_meta else (group.all_gather(joined.flatten(0, 1), given),)
    return Coming(lambda: torch.cat(joined.unbind(), dim), given, works)


def begin_reduce_scatter(x: Tensor, group: Group, dim: int) -> Coming:
    """Start to reduce-scatter `x`; the caller gets its slice along `dim`. No gradient flows through it."""
    slices = _stack(_slices(x, group, dim))
    total = torch.empty_like(slices[0])
    return Coming(lambda: total, slices, () if x.is_meta else (group.reduce_scatter(total, slices.flatten(0, 1)),))


def _reduce(x: Tensor, group: Group, _dim: int) -> Tensor:
    return reduce_from_group(x, group)


def _copy(x: Tensor, group: Group, _dim: int) -> Tensor:
    return copy_to_group(x, group)


def _view(x: Tensor, _group: Group, _dim: int) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group, _dim: int) -> Tensor:
    return begin_all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait_result()


def _slice(x: Tensor, group: Group, dim: int) -> Tensor:
    return _slices(x, group, dim)[group.index].clone(memory_format=torch.contiguous_format)


def _join(x: Tensor, group: Group, dim: int) -> Tensor:
    return begin_all_gather(x, group, dim).wait_result()


def _sum_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    return begin_reduce_scatter(x, group, dim).wait_result()


def _swap(x: Tensor, group: Group, dim: int) -> Tensor:
    slices = _stack(_slices(x, group, dim))
    swapped = torch.empty_like(slices)
    if not x.is_meta:
        group.all_to_all(swapped, slices).wait()
    return torch.cat(swapped.unbind(), dim)


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    """Stack tensors, contiguous: torch.stack itself may keep a channels-last layout."""
    return torch.stack(tensors).contiguous()


def _slices(x: Tensor, group: Group, dim: int) -> tuple[Tensor, ...]:
    """Cut `x` along `dim` into one slice per member."""
    if x.shape[dim] % group.size:
        raise MisfitError(f"cannot cut dimension {dim} of {tuple(x.shape)} into {group.size} equal slices")
    return x.chunk(group.size, dim)
