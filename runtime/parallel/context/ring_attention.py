"""Ring attention: each rank keeps its queries, and the keys and values of all ranks pass by, one shard at a time.

Zig-zag: a sequence is 2n chunks for n ranks, and rank r holds chunks r and 2n-1-r, so that all have as much to do.

    n = 4      chunks     keys of the same rank     keys of a rank before     keys of a rank behind
    rank 0     0  7       early ◣ ·                 early ■ ·                 early · ·
    rank 1     1  6       late  ■ ◣                 late  ■ ·                 late  ■ ■
    rank 2     2  5
    rank 3     3  4       ◣ causal  ■ all is seen  · nothing is: not computed

A rank gets the softmax of a query over one shard of keys after the other, as a weighted mean with the logarithm of its
weight, and merges the two (online softmax):

    weight  w = log(exp(w₁) + exp(w₂))        mean  o = exp(w₁ - w) o₁ + exp(w₂ - w) o₂

Forward    step 0: its keys      step 1: those of rank r-1      …      step n-1: those of rank r+1
Backward   the same round again; the gradients of a shard go one step behind it, each rank adds to them, and they come
           home after the last step. What a rank makes of its shard stays at home.

While a step is computed, the keys and values of the next one are under way. Messages per rank, of a shard of keys and
values each: n-1 forward, 2(n-1) backward. Sends and receives of a rank follow the order of the steps, each receive
before what needs it and all sends before the wait for what answers them, so that no rules of a wire make it stall.

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
"""Messages of a pipeline never have the same ends as these: its ranks differ in pp, those of a ring in cp only."""


class Arrival(NamedTuple):
    """A tensor on its way here, with what must be over before it may be used."""

    tensor: Tensor
    works: tuple[Work, ...]

    def wait(self) -> Tensor:
        """Return the tensor when it is there."""
        for work in self.works:
            work.wait()
        return self.tensor


class Ring:
    """The ranks of a group as a ring, seen from one of them; their channels are open (`ring_channels`)."""

    def __init__(self, transport: Transport, group: Group) -> None:
        self.size, self.index = group.size, group.index
        self._transport, self._group = transport, group
        self._next = group.ranks[(group.index + 1) % group.size]
        self._previous = group.ranks[group.index - 1]

    def shift(self, tensor: Tensor) -> Arrival:
        """Send keys and values to the next rank; return those that come from the rank before, under way."""
        buffer = torch.empty_like(tensor)
        receive = self._transport.recv(buffer, self._previous, KEYS_TAG)
        send = self._group.beside(self._transport.send(tensor, self._next, KEYS_TAG))
        return Arrival(buffer, (send, receive))

    def expect(self, like: Tensor) -> Arrival:
        """Return the gradients that the rank before will send, under way."""
        buffer = torch.empty_like(like)
        receive = self._transport.recv(buffer, self._previous, GRADIENTS_TAG)
        return Arrival(buffer, (self._group.beside(receive),))

    def hand_on(self, gradients: Tensor) -> Work:
        """Send gradients to the next rank."""
        return self._transport.send(gradients, self._next, GRADIENTS_TAG)


def ring_channels(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the directed channels of a ring of these ranks: each to the next, the last to the first."""
    return [(ranks[k - 1], ranks[k]) for k in range(len(ranks))] if len(ranks) > 1 else []


def ring_attention(ring: Ring, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Return what this rank's queries see in the keys and values of all ranks; every rank of the ring calls this.

    Args:
        ring: the ranks; where `causal`, each holds its two chunks in rising order.
        query: (samples, heads, tokens here, size); the heads are a multiple of those of the keys, in groups.
        key: (samples, heads, tokens here, size).
        value: like `key`.
        causal: whether a token sees only itself and those before it.

    Returns the shape of `query`. Softmax and sums are of float32 at least.
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
            seen.add(passing, _part(ring, step, key.shape[-2], causal))
            if coming is not None:
                passing = coming.wait()
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
        back = _Back.begin(ctx.kernel, grouped, gradient, mixed, weight)
        passing = _pack(key, value)
        home = torch.zeros_like(passing, dtype=weight.dtype)
        arriving: Arrival | None = None
        sent: Work = DoneWork()
        for step in range(ring.size):
            coming = ring.shift(passing) if step + 1 < ring.size else None
            behind = ring.expect(home) if step else None
            made = torch.zeros_like(home) if step else home
            back.add(passing, _part(ring, step, key.shape[-2], ctx.causal), made)
            if arriving is not None:
                made += arriving.wait()
            if step:
                sent.wait()
                sent = ring.hand_on(made)
            arriving = behind
            if coming is not None:
                passing = coming.wait()
        sent.wait()
        if arriving is not None:
            home += arriving.wait()
        of_key, of_value = home.to(key.dtype)
        return back.of_query.to(query.dtype).flatten(1, 2), of_key, of_value, None, None


class _ScoreBlock(NamedTuple):
    """Which of the queries here see which of the keys that are passing; on the diagonal, those up to themselves."""

    queries: slice
    keys: slice
    is_diagonal: bool = False


def _part(ring: Ring, step: int, length: int, causal: bool) -> _ScoreBlock:
    """Return what is to be computed at a step: see the picture of the module."""
    early, late, whole = slice(0, length // 2), slice(length // 2, length), slice(0, length)
    if not causal:
        return _ScoreBlock(whole, whole)
    if step == 0:
        return _ScoreBlock(whole, whole, is_diagonal=True)
    return _ScoreBlock(whole, early) if step <= ring.index else _ScoreBlock(late, whole)


class _Seen(NamedTuple):
    """What the queries have seen so far: the mean of the values, and the logarithm of its weight.

    Tensors of queries are (samples, key heads, query heads of a key head, tokens, …) in this module.
    """

    kernel: Kernel
    query: Tensor
    mean: Tensor
    weight: Tensor

    @classmethod
    def nothing(cls, kernel: Kernel, query: Tensor) -> _Seen:
        mean = torch.zeros_like(query, dtype=wide(query.dtype), memory_format=torch.contiguous_format)
        return cls(kernel, query, mean, mean.new_full(query.shape[:-1], -torch.inf))

    def add(self, passing: Tensor, block: _ScoreBlock) -> None:
        """Let the queries of a block see its keys and values; each has seen itself first, so no weight stays zero."""
        key, value = passing[..., block.keys, :]
        mixed, fresh = attend(self.kernel, (self.query[..., block.queries, :], key, value), block.is_diagonal)
        mean, weight = self.mean[..., block.queries, :], self.weight[..., block.queries]
        total = torch.logaddexp(weight, fresh)
        mean.lerp_(mixed.to(mean.dtype), (fresh - total).exp()[..., None])
        weight.copy_(total)


class _Back(NamedTuple):
    """What a backward goes by, and the gradient of the queries so far."""

    kernel: Kernel
    query: Tensor
    gradient: Tensor
    mixed: Tensor
    weight: Tensor
    of_query: Tensor

    @classmethod
    def begin(cls, kernel: Kernel, query: Tensor, gradient: Tensor, mixed: Tensor, weight: Tensor) -> _Back:
        of_query = torch.zeros_like(query, dtype=weight.dtype, memory_format=torch.contiguous_format)
        return cls(kernel, query, gradient, mixed, weight, of_query)

    def add(self, passing: Tensor, block: _ScoreBlock, made: Tensor) -> None:
        """Add the gradients of a block: of the queries here, and to `made` those of the keys and values."""
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
    """Return keys and values as one message; torch would keep a layout with channels last."""
    return torch.stack((key, value)).contiguous()


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose rows are in one piece each, as kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_key_head(tensor: Tensor, key: Tensor) -> Tensor:
    """Return (samples, heads, …) as (samples, key heads, query heads of a key head, …)."""
    grouped: Tensor = tensor.unflatten(1, (key.shape[1], -1))
    return grouped
