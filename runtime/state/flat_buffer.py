"""How some parameters stand in one flat tensor, and what of it each replica has as its own.

parameters     [   p2   ] [ p1 ] [      p0      ]
flat tensor    [   p2  ·│ p1 ··│      p0    ····]       ·: unused, so that parameters begin at round places
two replicas   [        0       │        1      ]       own share of each: equal, whatever it cuts through
segments                 p2, p1, p0 │ p0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

ROUND = 32
"""At multiples of so many numbers parameters begin that are computed with: kernels are slow, or picky, elsewhere."""


@dataclass(frozen=True)
class Segment:
    """What of a parameter lies in the own share: numbers [start, stop) of it, from place `at` of the share on."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class FlatLayout:
    """Where parameters of these shapes stand in a flat tensor of `parts` equal shares; `index` says which is ours."""

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    share: int
    parts: int = 1
    index: int = 0

    @classmethod
    def packed(cls, tensors: Sequence[Tensor]) -> FlatLayout:
        """Return the layout in which tensors stand side by side, in one share."""
        return cls._of(tensors, 1, 1, 0)

    @classmethod
    def shared(cls, tensors: Sequence[Tensor], parts: int, index: int) -> FlatLayout:
        """Return the layout in which tensors begin at round places, in `parts` shares."""
        return cls._of(tensors, ROUND, parts, index)

    @classmethod
    def _of(cls, tensors: Sequence[Tensor], multiple: int, parts: int, index: int) -> FlatLayout:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() // multiple) * multiple
        share = -(-end // (parts * multiple)) * multiple
        return cls(tuple(tuple(t.shape) for t in tensors), tuple(starts), share, parts, index)

    @property
    def size(self) -> int:
        """How many numbers the flat tensor has."""
        return self.parts * self.share

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters in the flat tensor, in their shapes."""
        return [
            flat.narrow(0, start, prod(shape)).view(shape)
            for shape, start in zip(self.shapes, self.starts, strict=True)
        ]

    def own(self, flat: Tensor) -> Tensor:
        """Return the own share of the flat tensor, in its memory."""
        return flat.narrow(0, self.index * self.share, self.share)

    def segments(self) -> list[Segment | None]:
        """Return what of each parameter lies in the own share; None where nothing does."""
        first = self.index * self.share
        return [
            _overlap(start, start + prod(shape), first, first + self.share)
            for shape, start in zip(self.shapes, self.starts, strict=True)
        ]


def _overlap(start: int, stop: int, first: int, last: int) -> Segment | None:
    low, high = max(start, first), min(stop, last)
    return Segment(low - start, high - start, low - first) if low < high else None
