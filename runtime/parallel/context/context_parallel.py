"""Context parallelism: each rank holds a slice of every sequence, and attention covers the whole sequence.

    sequence of 2n chunks, n ranks of cp     [ 0  1  2  3  4  5  6  7 ]
    rank r holds chunks r and 2n-1-r         rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

All layers but attention are tokenwise, and need at most the tokens' positions. A block that takes `context` by name is
passed a `Context`: the positions, and an attention over the whole sequence. Without cp it is not passed:

    def forward(self, tokens, context=None):
        …
        mixed = context.attend(query, key, value) if context else F.scaled_dot_product_attention(…)

    ring      keys and values circulate one shard at a time; a rank sends 2(n-1) shards in the forward and 4(n-1) in the
              backward, and stores only its own slice (see `ring_attention`)
    gather    all-gather of all keys and values, which are saved for the backward
    ulysses   an all-to-all turns sequence shards into head shards, and another one turns them back: each rank has
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
from ...settings.allowed_setting_values import ContextMethod
from .ring_attention import Ring, ring_attention

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class SequenceShard:
    """Zig-zag slice of a sequence on rank `index` of `size`: one early and one late chunk."""

    size: int
    index: int

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's slice of (samples, sequence, …), chunks in ascending order.

        Raises `MisfitError` if the sequence does not divide into 2 · size chunks.
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
        """Return the positions of this rank's tokens in a sequence of `length`: int64, ascending."""
        return self.cut("positions", torch.arange(length)[None])[0]


WHOLE_SEQUENCE = SequenceShard(1, 0)
"""The shard of a mesh without cp: the whole sequence."""


class Context:
    """Context that a block is passed with its slice of the sequences: positions and attention.

    Attributes:
        length: tokens of a whole sequence.
        positions: positions of the local tokens, ascending, int64 (length / cp,).
    """

    def __init__(self, length: int, shard: SequenceShard, group: Group, attend: Attend) -> None:
        self.length = length
        self.positions = shard.positions(length).to(group.device)
        self._group = group
        self._attend = attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
        """Attend from each local token to the whole sequence, or if `causal` to itself and earlier tokens.

        Collective over cp. Arguments and result are (samples, heads, local tokens, size); keys and values may have
        fewer heads (GQA), each shared by consecutive query heads.

        Raises `MisfitError` for another number of tokens than the local ones.
        """
        if query.shape[-2] != len(self.positions) or key.shape[-2] != len(self.positions):
            raise MisfitError(
                f"an attention between {query.shape[-2]} queries and {key.shape[-2]} keys, but of the sequence of "
                f"{self.length} there are {len(self.positions)} tokens on each rank of cp={self._group.size}"
            )
        return self._attend(query, key, value, causal)

    def whole(self, tensor: Tensor) -> Tensor:
        """All-gather slices (samples, local tokens, …) to whole sequences; other tensors are returned unchanged.

        Collective over cp. Each rank then has a loss over all tokens, which counts as a part of the total.
        """
        if tensor.dim() < 2 or tensor.shape[1] != len(self.positions):
            return tensor
        if not tensor.is_floating_point():
            return whole_sequences(tensor, self._group, 1)
        shard = SequenceShard(self._group.size, self._group.index)
        order = _all_positions(self._group, shard, self.length).argsort()
        return all_gather(tensor, self._group, 1).index_select(1, order)


class ContextParallel:
    """Context parallelism of one rank.

    Args:
        method: ring, gather or ulysses.
        group: the ranks that hold slices of the same sequences.
        transport: point-to-point transport of a ring, whose channels must be open before the first attention.
        compiled: whether blocks are compiled; attention then stays outside of the compiled code.

    Raises `UsageError` for an unknown method.
    """

    def __init__(self, method: ContextMethod, group: Group, transport: Transport, compiled: bool) -> None:
        if method not in get_args(ContextMethod):
            raise UsageError(f"context: there is no method {method!r}{suggest(method, get_args(ContextMethod))}")
        self.shard = SequenceShard(group.size, group.index)
        self._method, self._group, self._transport, self._compiled = method, group, transport, compiled

    def context_of(self, inputs: TensorSpec) -> Context | None:
        """Return the `Context` for blocks whose inputs (samples, local tokens, …) are slices; None without cp."""
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
    """All-gather zig-zag slices along a dimension to whole sequences, without autograd (collective)."""
    is_flag = mine.dtype is torch.bool
    rows = mine.transpose(0, dim).to(torch.uint8 if is_flag else mine.dtype).contiguous()
    gathered = rows.new_empty((group.size * len(rows), *rows.shape[1:]))
    group.all_gather(gathered, rows).wait()
    order = _all_positions(group, SequenceShard(group.size, group.index), len(gathered)).argsort()
    whole = gathered[order.to(gathered.device)].transpose(0, dim)
    return whole.to(torch.bool) if is_flag else whole


def _all_positions(group: Group, shard: SequenceShard, length: int) -> Tensor:
    """Return the positions of the tokens of all ranks, concatenated in rank order."""
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
