"""Context parallelism: each rank holds a slice of every sequence, and attention reaches over all slices.

    sequence of 2n chunks, n ranks of cp     [ 0  1  2  3  4  5  6  7 ]
    rank r holds chunks r and 2n-1-r         rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

All but attention works on tokens one by one, and needs to know no more than their positions. A block that takes
`context` by name is given them, and an attention over the whole sequence; where the mesh has no cp it is given nothing:

    def forward(self, tokens, context=None):
        …
        mixed = context.attend(query, key, value) if context else F.scaled_dot_product_attention(…)

    ring      keys and values pass by, one shard at a time; 2(n-1) shards of them a rank sends forward and 4(n-1) back,
              and keeps none but its slice (see `ring_attention`)
    gather    each rank gets all keys and values at once, and keeps them for the backward
    ulysses   an all-to-all turns shards of the sequence into shards of the heads, and another one back: each rank has
              all tokens of some heads (Jacobs et al. 2023, "DeepSpeed Ulysses")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from quintsched.errors import MisfitError, UsageError, suggest

from ...blocks.trees import TensorSpec
from ...comm import Group, Transport
from ...comm.autograd_collectives import all_gather, all_to_all
from ...settings.run_settings import ContextMethod
from .ring_attention import Ring, ring_attention

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class SequenceShard:
    """The slice of a sequence that rank `index` of `size` holds: one early chunk and one late."""

    size: int
    index: int

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's slice of (samples, sequence, …), chunks in rising order.

        Raises `MisfitError` where the sequence does not divide into chunks.
        """
        if self.size == 1:
            return tensor
        count = 2 * self.size
        if tensor.dim() < 2 or tensor.shape[1] % count or not tensor.shape[1]:
            raise MisfitError(
                f"{name} of shape {tuple(tensor.shape)}: dimension 1 has to be a sequence that divides into {count} "
                f"equal chunks, two for each rank of cp={self.size}"
            )
        chunks = tensor.chunk(count, 1)
        return torch.cat((chunks[self.index], chunks[-1 - self.index]), 1)

    def positions(self, length: int) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `length`: int64, in rising order."""
        return self.cut("positions", torch.arange(length)[None])[0]


WHOLE = SequenceShard(1, 0)
"""All of the sequence."""


class Context:
    """What a block is passed of the sequences of which it has a slice.

    Attributes:
        length: tokens of a whole sequence.
        positions: those of the tokens here, in rising order; int64.
    """

    def __init__(self, length: int, shard: SequenceShard, group: Group, attend: Attend) -> None:
        self.length = length
        self.positions = shard.positions(length).to(group.device)
        self._group = group
        self._attend = attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
        """Let each token here attend to the whole sequence, or if `causal` to itself and those before it.

        All ranks of cp call this. Arguments and result are (samples, heads, tokens here, size); keys and values may
        have fewer heads, of which each serves as many query heads in a row.

        Raises `MisfitError` for other tokens than those here.
        """
        if query.shape[-2] != len(self.positions) or key.shape[-2] != len(self.positions):
            raise MisfitError(
                f"an attention between {query.shape[-2]} queries and {key.shape[-2]} keys, but of the sequence of "
                f"{self.length} there are {len(self.positions)} tokens on each rank of cp={self._group.size}"
            )
        return self._attend(query, key, value, causal)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return whole sequences of what has their slices here, (samples, tokens here, …); else the tensor itself.

        All ranks of cp call this; each has a loss of all tokens then, which counts as a part of it.
        """
        if tensor.dim() < 2 or tensor.shape[1] != len(self.positions):
            return tensor
        if not tensor.is_floating_point():
            return whole_sequences(tensor, self._group, 1)
        shard = SequenceShard(self._group.size, self._group.index)
        order = _all_positions(self._group, shard, self.length).argsort()
        return all_gather(tensor, self._group, 1).index_select(1, order)


class ContextParallel:
    """Context parallelism as one rank sees it.

    Args:
        method: how attention reaches over the slices of a sequence.
        group: the ranks that hold slices of each sequence.
        transport: what carries the messages of a ring, whose channels must be open by the first attention.
        compiled: whether blocks are compiled; collectives and messages then stay outside of the compiled code.

    Raises `UsageError` for an unknown method.
    """

    def __init__(self, method: ContextMethod, group: Group, transport: Transport, compiled: bool) -> None:
        if method not in get_args(ContextMethod):
            raise UsageError(f"context: there is no method {method!r}{suggest(method, get_args(ContextMethod))}")
        self.shard = SequenceShard(group.size, group.index)
        self._method, self._group, self._transport, self._compiled = method, group, transport, compiled

    def context_of(self, inputs: TensorSpec) -> Context | None:
        """Return what blocks are passed of the sequences that `inputs` are slices of; None where they are whole."""
        if self.shard.size == 1:
            return None
        length = inputs.shape[1] * self.shard.size
        attend = self._attend(length)
        return Context(length, self.shard, self._group, torch.compiler.disable(attend) if self._compiled else attend)

    def _attend(self, length: int) -> Attend:
        match self._method:
            case "ring":
                return partial(ring_attention, Ring(self._transport, self._group))
            case "gather":
                return _gathering(self._group, self.shard, length)
            case "ulysses":
                return _swapping(self._group, self.shard, length)


def whole_sequences(mine: Tensor, group: Group, dim: int) -> Tensor:
    """Return the whole sequences of which each member of a group has its chunks along a dimension (collective)."""
    is_flag = mine.dtype is torch.bool
    rows = mine.transpose(0, dim).to(torch.uint8 if is_flag else mine.dtype).contiguous()
    gathered = rows.new_empty((group.size * len(rows), *rows.shape[1:]))
    group.all_gather(gathered, rows).wait()
    order = _all_positions(group, SequenceShard(group.size, group.index), len(gathered)).argsort()
    whole = gathered[order.to(gathered.device)].transpose(0, dim)
    return whole.to(torch.bool) if is_flag else whole


def _all_positions(group: Group, shard: SequenceShard, length: int) -> Tensor:
    """Return the positions of the tokens of all ranks, one rank after the other."""
    shards = [SequenceShard(shard.size, index) for index in range(shard.size)]
    return torch.cat([other.positions(length) for other in shards]).to(group.device)


def _gathering(group: Group, shard: SequenceShard, length: int) -> Attend:
    mine = shard.positions(length).to(group.device)
    visible = mine[:, None] >= _all_positions(group, shard, length)

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        key, value = all_gather(torch.stack((key, value)), group, -2)
        return _attention(query, key, value, mask=visible if causal else None)

    return attend


def _swapping(group: Group, shard: SequenceShard, length: int) -> Attend:
    order = _all_positions(group, shard, length).argsort()
    back = order.argsort()

    def to_heads(tensor: Tensor) -> Tensor:
        """(samples, heads, tokens here, size) to (samples, heads here, tokens, size)."""
        by_rank = all_to_all(tensor, group, 1).unflatten(1, (group.size, -1))
        tokens: Tensor = by_rank.transpose(1, 2).flatten(2, 3)
        return tokens.index_select(2, order)

    def to_tokens(tensor: Tensor) -> Tensor:
        by_rank = tensor.index_select(2, back).unflatten(2, (group.size, -1))
        return all_to_all(by_rank.transpose(1, 2).flatten(1, 2), group, 1)

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        for name, tensor in (("query", query), ("key", key)):
            if tensor.shape[1] % group.size:
                raise MisfitError(
                    f"ulysses cuts heads over cp={group.size}, but there are {tensor.shape[1]} {name} heads on a rank; "
                    "choose context ring or gather, or another number of heads"
                )
        return to_tokens(_attention(to_heads(query), to_heads(key), to_heads(value), is_causal=causal))

    return attend


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
