"""Torch's dropouts and its attention with dropout, by words in place of a generator.

    dropout          a mask of the input's shape             attention     a mask of the scores' shape,
    dropout1d … 3d   one of (samples, channels, 1 …)                       (samples, heads, queries, keys)

Each takes what the function of torch of that name takes, and `draw`, which gives words for a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from . import numbers

Draw = Callable[[Sequence[int]], Tensor]

_ALPHA = 1.7580993408473766
"""Minus the limit of SELU: what an alpha dropout puts in place of what it drops."""


def dropout(draw: Draw, x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """Drop numbers of x with probability p, and scale the others up."""
    return _dropped(x, _stays(draw, x.shape, p), p, inplace=inplace)


def feature_dropout(draw: Draw, x: Tensor, p: float, *, samples: bool = True, inplace: bool = False) -> Tensor:
    """Drop whole channels of (samples, channels, …), or of (channels, …)."""
    return _dropped(x, _stays(draw, _channels(x, samples), p), p, inplace=inplace)


def alpha_dropout(draw: Draw, x: Tensor, p: float, *, features: bool = False, inplace: bool = False) -> Tensor:
    """Drop to SELU's limit, and keep mean and variance."""
    stays = _stays(draw, _channels(x, samples=True) if features else x.shape, p)
    a = 1 / sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    shift = _ALPHA * a * (p - 1 + stays.to(x.dtype)) if p < 1 else torch.zeros_like(stays, dtype=x.dtype)
    found = (x * stays).mul_(a) + shift
    return x.copy_(found) if inplace else found


def rrelu(draw: Draw, x: Tensor, lower: float, upper: float, *, inplace: bool = False) -> Tensor:
    """Scale negative numbers by random slopes."""
    slopes = lower + (upper - lower) * numbers.uniform(draw(x.shape), x.dtype)
    found = torch.where(x <= 0, x * slopes, x)
    return x.copy_(found) if inplace else found


def gumbel_softmax(draw: Draw, logits: Tensor, tau: float = 1, hard: bool = False, dim: int = -1) -> Tensor:
    """Sample from a categorical distribution, relaxed; `hard`: one-hot, with the gradient of the relaxed one."""
    noise = -numbers.exponential(draw(logits.shape)).to(logits.dtype).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attend from (…, queries, size) to (…, keys, size), and drop out of the probabilities."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    shares = scores.softmax(-1)
    if mask is not None and mask.dtype == torch.bool:
        shares = shares.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return dropout(draw, shares, p) @ value


def _stays(draw: Draw, shape: Sequence[int], p: float) -> Tensor:
    if not 0 <= p <= 1:
        functional.dropout(torch.empty(0), p)  # torch says what is wrong
    return ~numbers.bernoulli(draw(shape), p)


def _channels(x: Tensor, samples: bool) -> Sequence[int]:
    kept = 2 if samples else 1
    return (*x.shape[:kept], *[1] * (x.dim() - kept))


def _dropped(x: Tensor, stays: Tensor, p: float, *, inplace: bool) -> Tensor:
    found = (x * stays).mul_(1 / (1 - p) if p < 1 else 0.0)
    return x.copy_(found) if inplace else found
