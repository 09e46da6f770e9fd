"""Torch's distributions as functions of words, 32 random bits in int64 for every number.

words ──▶ uniform in [0, 1), of as many digits as the type has ──▶ rand, uniform_, randint, bernoulli
      ──▶ uniform in (0, 1), float64                          ──▶ normal, exponential, …, by their inverses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log1p, pi, sqrt
from types import MappingProxyType

import torch
from torch import Tensor

BITS = 32
_DIGITS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 24, torch.float16: 11, torch.bfloat16: 8})

Words = Callable[[], Tensor]


def uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), which are below 1 in this type too."""
    digits = _DIGITS.get(dtype, BITS)
    return (words >> (BITS - digits)).to(dtype) * 2.0**-digits


def bernoulli(words: Tensor, p: float | Tensor) -> Tensor:
    """Return true with probability p."""
    limit = (p.double() * 2.0**BITS).round() if isinstance(p, Tensor) else round(p * 2**BITS)
    return words < limit


def normal(words: Tensor) -> Tensor:
    """Return float64 numbers of mean 0 and variance 1."""
    return torch.erfinv(2 * _inside(words) - 1) * sqrt(2)


def exponential(words: Tensor) -> Tensor:
    """Return float64 numbers of mean 1."""
    return -torch.log(_inside(words))


def integers(words: Tensor, low: int, high: int) -> Tensor:
    """Return int64 numbers from `low` up to, and not including, `high`; these are at most 2³² apart."""
    return low + ((words * (high - low)) >> BITS) if high - low <= 2**31 else low + words % (high - low)


def cauchy(words: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """Return float64 numbers of a Cauchy distribution."""
    return median + sigma * torch.tan(pi * (_inside(words) - 0.5))


def log_normal(words: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """Return float64 numbers whose logarithm is normal."""
    return torch.exp(mean + std * normal(words))


def geometric(words: Tensor, p: float) -> Tensor:
    """Return how many trials it takes until the first success, float64."""
    return torch.ceil(torch.log(_inside(words)) / log1p(-p)).clamp_(min=1)


def _inside(words: Tensor) -> Tensor:
    """Return float64 numbers in (0, 1)."""
    return (words.double() + 0.5) * 2.0**-BITS
