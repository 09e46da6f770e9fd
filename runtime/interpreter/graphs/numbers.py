"""The numbers of a step that was run twice, from its graph and by its instructions, and by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LIKE = 4.0
"""Numbers of a graph may be so many times as far off as those of repetitions by instructions."""

MOST_APART = 64
"""At most so many replays go by between two comparisons."""

SCATTER = 0x9E3779B1


class Numbers:
    """Gradients of parameters, tensors that forwards change, the figures of the norm, and those of loss and metrics."""

    def __init__(self, sums: Sequence[Tensor], figures: Tensor, table: Tensor) -> None:
        # Neither a stop that was asked for, nor marks of data: these are the host's.
        self.tensors = [*sums, figures[:2], table[:-2]]

    def copied(self) -> Numbers:
        """Return a copy, which the next step leaves alone."""
        copy = object.__new__(Numbers)
        copy.tensors = [tensor.clone() for tensor in self.tensors]
        return copy

    def apart_from(self, other: Numbers) -> list[float]:
        """Return the distance of each tensor, as a share of the other's norm."""
        return [_share(found, expected) for found, expected in zip(self.tensors, other.tensors, strict=True)]


def _share(found: Tensor, expected: Tensor) -> float:
    """Return the distance as a share of the norm; what is not finite has to be so in both."""
    if torch.equal(found, expected):
        return 0.0
    if not found.is_floating_point():
        found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    found, expected = found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    norm, distance = torch.linalg.vector_norm(expected).item(), torch.linalg.vector_norm(found - expected).item()
    return distance / norm if norm else math.inf if distance else 0.0


def beyond_rounding(apart: float, among_themselves: float, numbers: Tensor) -> float:
    """Return by how much numbers differ, where they may not: more than they do among themselves, or much."""
    most = torch.finfo(numbers.dtype).eps ** 0.5 if numbers.is_floating_point() else 0.0
    return apart if apart > min(LIKE * among_themselves, most) else 0.0


def next_moment(compared: int) -> int:
    """Return which replay is compared next, up to twice as many later, but soon; no rhythm of a training keeps up."""
    return compared + 1 + ((compared * SCATTER) >> 7) % min(max(compared, 1), MOST_APART)
