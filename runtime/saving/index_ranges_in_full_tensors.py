"""Placement of a rank's numbers in a full tensor: as boxes, each a contiguous range along every dimension.

Every format follows from it: files of ranks, PyTorch's distributed checkpoints, safetensors of transformers.

full (4, 6)     tp=2 cuts columns, in two fused blocks     ZeRO: of the shard, numbers 3 to 10 of 12
· · · · · ·     ▓ · · ▓ · ·   (of rank 0: 0 and 3 … )      a flat range is at most a row's end, whole rows, and
· · · · · ·     ▓ · · ▓ · ·                                a row's beginning

Layout of a rank's file in the whole model, which makes it fit any other mesh:

    rank-00002.safetensors   __metadata__  quintsched.layout: {…, "tensors": {"model.3.qkv.weight": 0, …}}
                             "model.3.qkv.weight"                     [▓▓▓▓▓]         numbers 4 to 9 of the flat …
                                                                         │
    layout.placements["model.3.qkv.weight"]     · ▓ · ▓ · ▓  ◀───────────┘            … shard 1 of 2, of three blocks
                                                · ▓ · ▓ · ▓

A tensor without a placement is whole. `beside` are optimizer states of a sharded weight that have another shape than
it: only a rank with the same shard can load them, unless they are values that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from quintsched.errors import InputError
from quintsched.files.strictjson import describe_faults, parse_strict
from quintsched.files.user_records import FormatVersion

from ..parallel.tensor.parameter_shards import TpShard, shard_of

Range = tuple[int, int]
"""Half-open range: first place, and one behind the last."""


@dataclass(frozen=True)
class TensorPiece:
    """A piece of a full tensor: its offset in each dimension, and its numbers in this rank's memory."""

    offsets: tuple[int, ...]
    numbers: Tensor

    @property
    def places(self) -> tuple[slice, ...]:
        """The box as an index into the full tensor."""
        sizes = self.numbers.shape
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, sizes, strict=True))

    def places_from(self, offsets: Sequence[int]) -> tuple[slice, ...]:
        """Return the box as an index into another one that begins at `offsets`."""
        return tuple(
            slice(place.start - first, place.stop - first) for place, first in zip(self.places, offsets, strict=True)
        )

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> TensorPiece | None:
        """Return the intersection with another box, or None."""
        ranges = [
            (max(place.start, first), min(place.stop, first + size))
            for place, first, size in zip(self.places, offsets, sizes, strict=True)
        ]
        if any(first >= last for first, last in ranges):
            return None
        here = tuple(
            slice(first - start, last - start) for (first, last), start in zip(ranges, self.offsets, strict=True)
        )
        return TensorPiece(tuple(first for first, _ in ranges), self.numbers[here])

    def without(self, hole: TensorPiece) -> Iterator[TensorPiece]:
        """Yield boxes that fill this one except `hole`, which is inside it."""
        begins, sizes = list(self.offsets), list(self.numbers.shape)
        for dim, place in enumerate(hole.places):
            begin, end = begins[dim], begins[dim] + sizes[dim]
            for first, last in ((begin, place.start), (place.stop, end)):
                begins[dim], sizes[dim] = first, last - first
                rest = self.within(begins, sizes) if first < last else None
                if rest is not None:
                    yield rest
            begins[dim], sizes[dim] = place.start, place.stop - place.start


@dataclass(frozen=True)
class TensorPlacement:
    """A rank's part of a tensor: full and local shape, offsets, the cut by tp, and the flat range that ZeRO keeps."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    offsets: tuple[int, ...]
    cut: TpShard | None = None
    span: Range | None = None

    @classmethod
    def whole(cls, shape: Sequence[int], span: Range | None = None) -> TensorPlacement:
        """Return the placement of a full tensor, or of a range of its flat numbers."""
        return cls(tuple(shape), tuple(shape), (0,) * len(shape), None, span)

    @classmethod
    def from_tensor(cls, tensor: Tensor, span: Range | None = None) -> TensorPlacement:
        """Return the placement of a parameter or buffer in the full one; `span` is the flat range of a ZeRO segment."""
        if isinstance(tensor, DTensor):
            local, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            return cls(tuple(tensor.shape), tuple(local), tuple(offsets))
        shard, local = shard_of(tensor), tuple(tensor.shape)
        shape = list(local)
        if shard is not None:
            shape[shard.dim] *= shard.size
        return cls(tuple(shape), local, (0,) * len(local), shard, span)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the tensor."""
        return self.local == self.shape and self.span in (None, (0, prod(self.local)))

    @property
    def is_plain(self) -> bool:
        """Whether this is the full tensor, in its shape."""
        return self.is_whole and self.span is None

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of the numbers held: the local shape, or the length of the flat range."""
        return self.local if self.span is None else (self.span[1] - self.span[0],)

    def boxes(self, numbers: Tensor) -> Iterator[TensorPiece]:
        """Yield the boxes that this rank holds: `numbers` are of the local shape, or flat with a span."""
        for offsets, part in self._parts(numbers):
            if self.cut is None:
                yield TensorPiece(tuple(a + b for a, b in zip(offsets, self.offsets, strict=True)), part)
            else:
                yield from self._apart(self.cut, TensorPiece(offsets, part))

    def _parts(self, numbers: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        if self.span is None:
            yield (0,) * len(self.local), numbers
            return
        at, flat = 0, numbers.reshape(-1)
        for offsets, sizes in flat_boxes(self.local, *self.span):
            count = prod(sizes)
            yield offsets, flat[at : at + count].view(sizes)
            at += count

    def _apart(self, shard: TpShard, box: TensorPiece) -> Iterator[TensorPiece]:
        """Yield the parts of a box that belong to different fused blocks of the full tensor, each at its place."""
        dim, begin = shard.dim, 0
        for place in shard.places(self.shape[dim]):
            size = place.stop - place.start
            window = [0] * len(self.local), list(self.local)
            window[0][dim], window[1][dim] = begin, size
            here = box.within(*window)
            if here is not None:
                moved = list(here.offsets)
                moved[dim] += place.start - begin
                yield TensorPiece(tuple(moved), here.numbers)
            begin += size


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that make up the flat range [start, stop) of a tensor of this shape."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
    elif len(shape) == 1:
        yield (start,), (stop - start,)
    else:
        row = prod(shape[1:])
        first, last = -(-start // row), stop // row
        if first > last:
            yield from _in_row(shape, last, start, stop)
            return
        yield from _in_row(shape, first - 1, start, first * row)
        if first < last:
            yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: Sequence[int], number: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = number * prod(shape[1:])
    for offsets, sizes in flat_boxes(shape[1:], start - begin, stop - begin):
        yield (number, *offsets), (1, *sizes)


LAYOUT = "quintsched.layout"
"""Key of the layout in a file's metadata."""

RUN = "quintsched.run"
"""Key there of the run that wrote the file, if recorded: files of two runs make no state together."""


@dataclass(frozen=True)
class StateLayout:
    """Description of the tensors in a rank's file.

    Attributes:
        replica: number of the rank's replica of the batch, and how many replicas there were.
        placements: by tensor, its placement in the full one; tensors not named are whole.
        beside: by optimizer state without a place in a full tensor, the placement of its weight.
        dtypes: by tensor, the dtype that blocks compute with, where it is stored in another ("bfloat16").
        own_names: the model's own names of the weights, by our names, where they differ.
        same: groups of our names that are one tensor.
    """

    replica: tuple[int, int] = (0, 1)
    placements: Mapping[str, TensorPlacement] = field(default_factory=dict)
    beside: Mapping[str, TensorPlacement] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    own_names: Mapping[str, str] = field(default_factory=dict)
    same: Sequence[Sequence[str]] = ()

    def to_text(self) -> str:
        """Return the layout as JSON text."""
        used = {one: n for n, one in enumerate(dict.fromkeys([*self.placements.values(), *self.beside.values()]))}
        return _Written(
            version=1,
            replica=self.replica,
            placements=list(used),
            tensors={name: used[placement] for name, placement in self.placements.items()},
            beside={name: used[placement] for name, placement in self.beside.items()},
            dtypes=dict(self.dtypes),
            own_names=dict(self.own_names),
            same=[list(names) for names in self.same],
        ).model_dump_json(exclude_none=True)

    def holds_as(self, other: StateLayout) -> bool:
        """Whether two ranks shard their weights alike; optimizer states are sharded as their weights."""
        mine, theirs = ({n: p for n, p in one.placements.items() if n.startswith("model.")} for one in (self, other))
        return mine == theirs

    @classmethod
    def from_text(cls, text: str) -> StateLayout:
        """Return the layout that `to_text` wrote; raises `InputError` with the place of the first fault."""
        try:
            read = _Written.model_validate(parse_strict(text))
            for placement in read.placements:
                _require_consistent(placement)
            tensors, beside = (
                {name: read.placements[number] for name, number in named.items()}
                for named in (read.tensors, read.beside)
            )
        except ValidationError as error:
            raise InputError(f"its layout: {describe_faults(error)}") from None
        except (InputError, IndexError) as error:
            raise InputError(f"its layout: {error}") from None
        return cls(read.replica, tensors, beside, read.dtypes, read.own_names, read.same)


class _Written(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: FormatVersion
    replica: tuple[int, int]
    placements: list[TensorPlacement]
    tensors: dict[str, int]
    beside: dict[str, int]
    dtypes: dict[str, Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]]
    own_names: dict[str, str]
    same: list[list[str]]


def _require_consistent(placement: TensorPlacement) -> None:
    """Raise `InputError` for a placement that contradicts itself."""
    dims, cut = len(placement.shape), placement.cut
    if len(placement.local) != dims or len(placement.offsets) != dims or (cut is not None and cut.dim >= dims):
        raise InputError(f"a placement in {dims} dimensions has others")
    sizes = (*placement.shape, *placement.local, *placement.offsets, *(placement.span or ()))
    if min(sizes, default=0) < 0 or (cut is not None and (min(cut.dim, cut.index) < 0 or cut.size < 1)):
        raise InputError("a placement has a size below 0")
