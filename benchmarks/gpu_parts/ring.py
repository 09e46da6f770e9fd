"""Ring attention's computation on one rank, forward and backward, beside one fused call of the same attention.

    one fused call      the whole sequence, scaled_dot_product_attention, causal
    a ring of one       the same, as the ring computes it
    a ring of n         the computation of a rank in its middle, times n: all shards pass by, without transfers

No message takes part, so a ratio above 1 is the price of computing shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from paired import Target, ratios, report, sample_warm
from torch import Tensor
from torch.nn import functional as F

from quintsched.runtime.comm import DoneWork, Work
from quintsched.runtime.parallel.context.ring_attention import ArrivingBuffer, Ring, ring_attention

from .model import synchronize

FUSED, AGAIN, WARM_UP, MOST = "one fused call", "one fused call again", 3, 1.05
RINGS = (1, 2, 4)


class StandingRing(Ring):
    """A ring whose shards are always there: this rank's own, again and again."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def shift(self, tensor: Tensor) -> ArrivingBuffer:
        return ArrivingBuffer(tensor, ())

    def expect(self, like: Tensor) -> ArrivingBuffer:
        return ArrivingBuffer(torch.zeros_like(like), ())

    def hand_on(self, gradients: Tensor) -> Work:
        return DoneWork()


def ring(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return the ratio of the ring to the fused call."""
    length, heads, dtype = (8192, 16, torch.bfloat16) if device.type == "cuda" else (64, 2, torch.float32)
    rivals: dict[str, Callable[[], None]] = {}
    for name in (FUSED, AGAIN):
        fused = partial(F.scaled_dot_product_attention, is_causal=True)
        rivals[name] = attention(fused, length, heads, dtype, device, times=1)
    for size in RINGS:
        standing = StandingRing(size, size // 2)
        passed = partial(_passed, standing)
        rivals[f"a ring of {size}"] = attention(passed, length // size, heads, dtype, device, times=size)
    samples = sample_warm(rivals, rounds, 1, partial(synchronize, device), WARM_UP)
    targets = [
        Target(f"a ring of {n} against it", ratios(samples, f"a ring of {n}", FUSED, 0).median, MOST) for n in RINGS
    ]
    return report(f"attention, {heads} heads, {length} tokens, causal", samples, 1, FUSED, targets)


def _passed(standing: Ring, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ring_attention(standing, query, key, value, True)


def attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    length: int,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    times: int,
) -> Callable[[], None]:
    """Return a call of an attention's forward and backward, so many times."""
    random = torch.Generator().manual_seed(0)
    shape = (3, 1, heads, length, 64)
    query, key, value = (
        tensor.to(device, dtype).requires_grad_() for tensor in torch.randn(shape, generator=random).unbind()
    )
    gradient = torch.ones_like(query)

    def run() -> None:
        for _ in range(times):
            torch.autograd.grad(attend(query, key, value), (query, key, value), gradient)
        synchronize(device)

    return run
