"""KV cache for attention over a sequence that comes in slices: keys and values of earlier slices, with gradients.

    slice      0            1            2                    forwards in this order, backwards against it
    keys     [k0]        [k0 k1]      [k0 k1 k2]              one buffer per microbatch, filled slice by slice
    ∂keys    [∂0]◀───────[∂0 ∂1]◀─────[∂0 ∂1 ∂2]              one buffer, accumulated; a slice reads its rows after
                                                              all later slices have added theirs

An attention takes `past` by name and calls `keys, values = past.extend(self, keys, values)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


class Store:
    """KV cache of one microbatch: keys and values of all attentions of a stage."""

    def __init__(self) -> None:
        self.rows: dict[tuple[nn.Module, int], SequenceBuffer] = {}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the buffers of keys and values."""
        return (row.whole for row in self.rows.values())


class SequenceBuffer:
    """Buffer for the keys or the values of the whole sequence, filled slice by slice, and its gradient."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.gradient: Tensor | None = None


class Past:
    """Context of an attention: the `seen` positions of its microbatch before the current slice."""

    def __init__(self, store: Store, number: int, slices: int, length: int) -> None:
        self._store = store
        self._total = slices * length
        self.seen = number * length

    def extend(self, site: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values so far: (samples, heads, slice, size) to (samples, heads, seen + slice, size).

        `site` is the calling module; each has a cache of its own.
        """
        return self._extend((site, 0), keys), self._extend((site, 1), values)

    def _extend(self, which: tuple[nn.Module, int], fresh: Tensor) -> Tensor:
        row = self._store.rows.get(which)
        if row is None:
            shape = (*fresh.shape[:-2], self._total, fresh.shape[-1])
            row = self._store.rows[which] = SequenceBuffer(torch.empty(shape, dtype=fresh.dtype, device=fresh.device))
        extended: Tensor = _Extend.apply(fresh, row, self.seen)  # type: ignore[no-untyped-call]
        return extended


class _Extend(torch.autograd.Function):
    """Append a slice to the cache. The write goes through `.data`, without a version count: the graphs of earlier
    slices saved only positions before this one, which the write does not touch."""

    @staticmethod
    def forward(ctx: Any, fresh: Tensor, row: SequenceBuffer, start: int) -> Tensor:
        ctx.row, ctx.start, ctx.end = row, start, start + fresh.shape[-2]
        row.whole.data[..., start : ctx.end, :].copy_(fresh)
        return row.whole.data[..., : ctx.end, :]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        row: SequenceBuffer = ctx.row  # type: ignore[attr-defined]
        start, end = ctx.start, ctx.end  # type: ignore[attr-defined]
        if row.gradient is None:
            row.gradient = gradient.clone()
        else:
            row.gradient.data[..., :end, :] += gradient  # gradients already returned are views of rows behind `end`
        return row.gradient[..., start:end, :], None, None
