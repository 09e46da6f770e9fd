"""Ring attention: each rank keeps its queries, and the keys and values of all ranks circulate, one shard at a time.

Zig-zag: a sequence is 2n chunks for n ranks, and rank r holds chunks r and 2n-1-r, which balances the causal work.

    n = 4      chunks     keys of the same rank     keys of an earlier rank   keys of a later rank
    rank 0     0  7       early ◣ ·                 early ■ ·                 early · ·
    rank 1     1  6       late  ■ ◣                 late  ■ ·                 late  ■ ■
    rank 2     2  5
    rank 3     3  4       ◣ causal  ■ all visible  · fully masked: not computed

A rank computes attention over one shard of keys after another, as a weighted mean o with the logarithm w of its weight
(logsumexp of the scores), and merges it into the running result (online softmax):

    weight  w = log(exp(w₁) + exp(w₂))        mean  o = exp(w₁ - w) o₁ + exp(w₂ - w) o₂

Forward    step 0: own keys      step 1: those of rank r-1      …      step n-1: those of rank r+1
Backward   the same round again; the gradients of a shard follow it one step behind, each rank adds its part, and they
           return to their rank after the last step. A rank's gradients of its own shard are not sent.

While a step is computed, the next keys and values are in flight. Messages per rank, each one shard of keys and values:
n-1 in the forward, 2(n-1) in the backward. A rank posts sends and receives in the order of the steps, each receive
before it is needed, and all sends before waiting for messages that depend on them: no transport can deadlock.

Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped
Attention", and Llama 3's zig-zag for the balance; Milakov, Gimelshein 2018 for the online softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import DoneWork, Group, Transport, Work
from .block_attention import Kernel, attend, choose, gradients, wide

KEYS_TAG, GRADIENTS_TAG = 0, 1
"""Tags of a ring's messages. Pipeline messages have other peers (ranks that differ in pp), so tags cannot clash."""


class ArrivingBuffer(NamedTuple):
    """A receive buffer in flight, with the works that must complete before it may be used."""

    tensor: Tensor
    works: tuple[Work, ...]

    def wait_tensor(self) -> Tensor:
        """Wait for the works, and return the tensor."""
        for work in self.works:
            work.wait()
        return self.tensor


class Ring:
    """Ring of the ranks of a group, as one of them; its channels must be open (`ring_channels`)."""

    def __init__(self, transport: Transport, group: Group) -> None:
        self.size, self.index = group.size, group.index
        self._transport, self._group = transport, group
        self._next = group.ranks[(group.index + 1) % group.size]
        self._previous = group.ranks[group.index - 1]

    def shift(self, tensor: Tensor) -> ArrivingBuffer:
        """Send keys and values to the next rank, and post the receive of those from the previous rank."""
        buffer = torch.empty_like(tensor)
        receive = self._transport.recv(buffer, self._previous, KEYS_TAG)
        send = self._group.beside(self._transport.send(tensor, self._next, KEYS_TAG))
        return ArrivingBuffer(buffer, (send, receive))

    def expect(self, like: Tensor) -> ArrivingBuffer:
        """Post the receive of gradients from the previous rank, shaped as `like`."""
        buffer = torch.empty_like(like)
        receive = self._transport.recv(buffer, self._previous, GRADIENTS_TAG)
        return ArrivingBuffer(buffer, (self._group.beside(receive),))

    def hand_on(self, gradients: Tensor) -> Work:
        """Send gradients to the next rank."""
        return self._transport.send(gradients, self._next, GRADIENTS_TAG)


def ring_channels(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the directed channels of a ring of these ranks: each to the next, the last to the first."""
    return [(ranks[k - 1], ranks[k]) for k in range(len(ranks))] if len(ranks) > 1 else []


def ring_attention(ring: Ring, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attend from this rank's queries to the keys and values of all ranks (collective over the ring).

    Args:
        ring: the ranks; if `causal`, each holds its two chunks in ascending order.
        query: (samples, heads, local tokens, size); the number of heads is a multiple of that of the keys (GQA).
        key: (samples, heads, local tokens, size).
        value: like `key`.
        causal: whether a token sees only itself and those before it.

    Returns the shape of `query`. Softmax and sums are in float32 at least.
    """
    mixed: Tensor = _RingAttention.apply(query, key, value, ring, causal)  # type: ignore[no-untyped-call]
    return mixed


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, causal: bool) -> Tensor:
        kernel = choose(key)
        query, passing = _rows(query), _pack(key, value)
        seen = _Seen.nothing(kernel, _by_key_head(query, key))
        for step in range(ring.size):
            coming = ring.shift(passing) if step + 1 < ring.size else None
            seen.add_block(passing, _part(ring, step, key.shape[-2], causal))
            if coming is not None:
                passing = coming.wait_tensor()
        mixed = seen.mean.to(query.dtype).flatten(1, 2)
        ctx.ring, ctx.causal, ctx.kernel = ring, causal, kernel
        ctx.save_for_backward(query, key, value, mixed, seen.weight)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mixed, weight = ctx.saved_tensors
        ring: Ring = ctx.ring
        grouped, gradient, mixed = (_by_key_head(_rows(tensor), key) for tensor in (query, gradient, mixed))
        back = _Back.begin_backward(ctx.kernel, grouped, gradient, mixed, weight)
        passing = _pack(key, value)
        home = torch.zeros_like(passing, dtype=weight.dtype)
        arriving: ArrivingBuffer | None = None
        sent: Work = DoneWork()
        for step in range(ring.size):
            coming = ring.shift(passing) if step + 1 < ring.size else None
            behind = ring.expect(home) if step else None
            made = torch.zeros_like(home) if step else home
            back.add_gradients(passing, _part(ring, step, key.shape[-2], ctx.causal), made)
            if arriving is not None:
                made += arriving.wait_tensor()
            if step:
                sent.wait()
                sent = ring.hand_on(made)
            arriving = behind
            if coming is not None:
                passing = coming.wait_tensor()
        sent.wait()
        if arriving is not None:
            home += arriving.wait_tensor()
        of_key, of_value = home.to(key.dtype)
        return back.of_query.to(query.dtype).flatten(1, 2), of_key, of_value, None, None


class _ScoreBlock(NamedTuple):
    """Slice of the local queries and slice of the circulating keys that they see; on the diagonal, causally."""

    queries: slice
    keys: slice
    is_diagonal: bool = False


def _part(ring: Ring, step: int, length: int, causal: bool) -> _ScoreBlock:
    """Return the score block of a step, as in the picture of the module."""
    early, late, whole = slice(0, length // 2), slice(length // 2, length), slice(0, length)
    if not causal:
        return _ScoreBlock(whole, whole)
    if step == 0:
        return _ScoreBlock(whole, whole, is_diagonal=True)
    return _ScoreBlock(whole, early) if step <= ring.index else _ScoreBlock(late, whole)


class _Seen(NamedTuple):
    """Running result of the forward: weighted mean of the values seen so far, and its log-weight.

    Query tensors are (samples, key heads, query heads per key head, tokens, …) in this module.
    """

    kernel: Kernel
    query: Tensor
    mean: Tensor
    weight: Tensor

    @classmethod
    def nothing(cls, kernel: Kernel, query: Tensor) -> _Seen:
        mean = torch.zeros_like(query, dtype=wide(query.dtype), memory_format=torch.contiguous_format)
        return cls(kernel, query, mean, mean.new_full(query.shape[:-1], -torch.inf))

    def add_block(self, passing: Tensor, block: _ScoreBlock) -> None:
        """Merge a block into the running result. In step 0 each query sees its own key, so no weight stays zero."""
        key, value = passing[..., block.keys, :]
        mixed, fresh = attend(self.kernel, (self.query[..., block.queries, :], key, value), block.is_diagonal)
        mean, weight = self.mean[..., block.queries, :], self.weight[..., block.queries]
        total = torch.logaddexp(weight, fresh)
        mean.lerp_(mixed.to(mean.dtype), (fresh - total).exp()[..., None])
        weight.copy_(total)


class _Back(NamedTuple):
    """Running state of the backward: its inputs, and the query gradients accumulated so far."""

    kernel: Kernel
    query: Tensor
    gradient: Tensor
    mixed: Tensor
    weight: Tensor
    of_query: Tensor

    @classmethod
    def begin_backward(cls, kernel: Kernel, query: Tensor, gradient: Tensor, mixed: Tensor, weight: Tensor) -> _Back:
        of_query = torch.zeros_like(query, dtype=weight.dtype, memory_format=torch.contiguous_format)
        return cls(kernel, query, gradient, mixed, weight, of_query)

    def add_gradients(self, passing: Tensor, block: _ScoreBlock, made: Tensor) -> None:
        """Accumulate a block's gradients: of the local queries, and into `made` those of its keys and values."""
        key, value = passing[..., block.keys, :]
        query, gradient, mixed = (tensor[..., block.queries, :] for tensor in (self.query, self.gradient, self.mixed))
        weight = self.weight[..., block.queries]
        of_query, of_key, of_value = gradients(
            self.kernel, gradient, (query, key, value), mixed, weight, block.is_diagonal
        )
        self.of_query[..., block.queries, :] += of_query
        made[0, ..., block.keys, :] += of_key
        made[1, ..., block.keys, :] += of_value


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Stack keys and values as one contiguous message; without `contiguous`, torch keeps a channels-last layout."""
    return torch.stack((key, value)).contiguous()


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor of unit stride in the last dimension, as kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_key_head(tensor: Tensor, key: Tensor) -> Tensor:
    """Reshape (samples, heads, …) to (samples, key heads, query heads per key head, …)."""
    grouped: Tensor = tensor.unflatten(1, (key.shape[1], -1))
    return grouped
