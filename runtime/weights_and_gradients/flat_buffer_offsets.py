"""Layout of parameters in one flat buffer, and its division into shards of equal size, one per replica.

parameters     [   p2   ] [ p1 ] [      p0      ]
flat buffer    [   p2  ·│ p1 ··│      p0    ····]       ·: unused, so that parameters begin at aligned offsets
two replicas   [     shard 0    │    shard 1    ]       shards are equal, and a border may cut a parameter
segments                 p2, p1, p0 │ p0

whole          [      p0      │ p2 ] [ p1 ····]       no border cuts a parameter: the largest first, each to the
two replicas   [    shard 0   │    shard 1    ]       least filled shard; shards are as long as the fullest one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

ALIGNMENT = 32
"""Parameters begin at multiples of this many numbers: kernels are slow, or fail, at other offsets."""


@dataclass(frozen=True)
class ShardSegment:
    """Part of a parameter in this rank's shard: its numbers [start, stop), at offset `at` of the shard."""

    start: int
    stop: int
    at: int

    def view_of(self, shard: Tensor) -> Tensor:
        """Return the segment as a view of a shard: one dimension."""
        return shard[self.at : self.at + self.stop - self.start]


@dataclass(frozen=True)
class FlatLayout:
    """Layout of parameters of these shapes in a flat buffer of `num_shards` equal shards; `index` is this rank's."""

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    shard_size: int
    num_shards: int = 1
    index: int = 0
    is_whole: bool = False
    """Whether every parameter is in a single shard."""

    @classmethod
    def sharded(
        cls, tensors: Sequence[Tensor], num_shards: int = 1, index: int = 0, *, multiple: int = ALIGNMENT
    ) -> FlatLayout:
        """Return the layout with tensors at multiples of `multiple`, in `num_shards` shards."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += _room_for(tensor, multiple)
        shard_size = -(-end // (num_shards * multiple)) * multiple
        return cls(tuple(tuple(t.shape) for t in tensors), tuple(starts), shard_size, num_shards, index)

    @classmethod
    def whole(cls, tensors: Sequence[Tensor], num_shards: int, index: int, *, at_one_place: bool = False) -> FlatLayout:
        """Return the layout with every tensor whole in one of `num_shards` shards: all in the first, or balanced."""
        sizes = [_room_for(tensor, ALIGNMENT) for tensor in tensors]
        filled, loads, owners = [0] * num_shards, [0] * num_shards, [0] * len(sizes)
        for number in sorted(range(len(sizes)), key=lambda number: -tensors[number].numel()):
            shards = range(1 if at_one_place else num_shards)
            owner = owners[number] = min(shards, key=lambda shard: (filled[shard], loads[shard], shard))
            filled[owner] += sizes[number]
            loads[owner] += tensors[number].numel()
        shard_size = max(filled)
        places = [owner * shard_size for owner in range(num_shards)]
        starts = []
        for size, owner in zip(sizes, owners, strict=True):
            starts.append(places[owner])
            places[owner] += size
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return cls(shapes, tuple(starts), shard_size, num_shards, index, is_whole=True)

    @property
    def size(self) -> int:
        """Length of the flat buffer, in numbers."""
        return self.num_shards * self.shard_size

    def zero_gaps(self, flat: Tensor) -> Tensor:
        """Zero the gaps between parameters, and return the buffer."""
        end = 0
        for start, shape in [*sorted(zip(self.starts, self.shapes, strict=True)), (self.size, ())]:
            if end < start:
                flat[end:start].zero_()
            end = start + prod(shape)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of the flat buffer in the parameters' shapes."""
        return [
            flat.narrow(0, start, prod(shape)).view(shape)
            for shape, start in zip(self.shapes, self.starts, strict=True)
        ]

    def shard(self, flat: Tensor) -> Tensor:
        """Return this rank's shard as a view of the flat buffer."""
        return flat.narrow(0, self.index * self.shard_size, self.shard_size)

    def held(self, shard: Tensor) -> list[Tensor | None]:
        """Return views of this rank's shard per parameter, None without a part of it; whole ones in their shapes.

        Those of layouts that may cut have one dimension, except that a parameter without dimensions is never cut.
        """
        return [
            None if segment is None else segment.view_of(shard).view(shape if self.is_whole or not shape else -1)
            for segment, shape in zip(self.segments(), self.shapes, strict=True)
        ]

    def filled(self) -> list[int]:
        """Return the number of parameter elements in each shard."""
        counts = [0] * self.num_shards
        for start, shape in zip(self.starts, self.shapes, strict=True):
            stop = start + prod(shape)
            for index in range(self.num_shards):
                first = index * self.shard_size
                counts[index] += max(0, min(stop, first + self.shard_size) - max(start, first))
        return counts

    def segments(self) -> list[ShardSegment | None]:
        """Return the segment of each parameter in this rank's shard; None where there is none."""
        first = self.index * self.shard_size
        return [
            _overlap(start, start + prod(shape), first, first + self.shard_size)
            for shape, start in zip(self.shapes, self.starts, strict=True)
        ]


def _room_for(tensor: Tensor, multiple: int) -> int:
    """Return the numbers that a tensor takes in a buffer; one without numbers has a place too, and so an owner."""
    return max(-(-tensor.numel() // multiple), 1) * multiple


def _overlap(start: int, stop: int, first: int, last: int) -> ShardSegment | None:
    low, high = max(start, first), min(stop, last)
    is_here = low < high or (start == stop and first <= start < last)
    return ShardSegment(low - start, high - start, low - first) if is_here else None
