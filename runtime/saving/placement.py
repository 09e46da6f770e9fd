"""Where the numbers of a rank lie in a full tensor: in boxes, each a contiguous range along every dimension.

Every format follows from it: files of ranks, PyTorch's distributed checkpoints, safetensors of transformers.

full (4, 6)     tp=2 cuts columns, in two fused blocks     ZeRO: of the shard, numbers 3 to 10 of 12
· · · · · ·     ▓ · · ▓ · ·   (of rank 0: 0 and 3 … )      a flat range is at most a row's end, whole rows, and
· · · · · ·     ▓ · · ▓ · ·                                a row's beginning

How what a rank saves lies in the whole model: what makes its file fit any other mesh.

    rank-00002.safetensors   __metadata__  quintsched.layout: {…, "tensors": {"model.3.qkv.weight": 0, …}}
                             "model.3.qkv.weight"                     [▓▓▓▓▓]         numbers 4 to 9 of the flat …
                                                                         │
    layout.placements["model.3.qkv.weight"]     · ▓ · ▓ · ▓  ◀───────────┘            … shard 1 of 2, of three blocks
                                                · ▓ · ▓ · ▓

A tensor of which the layout says nothing is whole. `beside` are states of an optimizer that have not the shape of the
weight, where that is cut: only a rank that cuts it alike can take them, unless they are values that all have alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from quintsched.errors import InputError
from quintsched.files.strictjson import describe_faults, parse_strict

from ..parallel.tensor.shard import Shard, shard_of

Range = tuple[int, int]
"""A first place, and one behind the last."""


@dataclass(frozen=True)
class Box:
    """A piece of a full tensor: the places where it begins, and its numbers, in this rank's memory."""

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

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
        """Return what of the box lies in another one, or None."""
        ranges = [
            (max(place.start, first), min(place.stop, first + size))
            for place, first, size in zip(self.places, offsets, sizes, strict=True)
        ]
        if any(first >= last for first, last in ranges):
            return None
        here = tuple(
            slice(first - start, last - start) for (first, last), start in zip(ranges, self.offsets, strict=True)
        )
        return Box(tuple(first for first, _ in ranges), self.numbers[here])

    def without(self, hole: Box) -> Iterator[Box]:
        """Yield boxes that fill this one but for `hole`, which lies in it."""
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
class Placement:
    """How a rank holds a tensor: the full shape, that of its part, how tp cut this, and which flat range ZeRO keeps."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    offsets: tuple[int, ...]
    cut: Shard | None = None
    span: Range | None = None

    @classmethod
    def whole(cls, shape: Sequence[int], span: Range | None = None) -> Placement:
        """Return how a full tensor is held, or a range of its flat numbers."""
        return cls(tuple(shape), tuple(shape), (0,) * len(shape), None, span)

    @classmethod
    def of(cls, tensor: Tensor, span: Range | None = None) -> Placement:
        """Return how a parameter or a buffer lies in the full one; with a span, as replicas have cut it up (ZeRO)."""
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
        """Whether this rank holds all of it."""
        return self.local == self.shape and self.span in (None, (0, prod(self.local)))

    @property
    def is_plain(self) -> bool:
        """Whether this is the full tensor, in its shape."""
        return self.is_whole and self.span is None

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of what is held: of a flat range, its length."""
        return self.local if self.span is None else (self.span[1] - self.span[0],)

    def boxes(self, numbers: Tensor) -> Iterator[Box]:
        """Yield the boxes of what this rank holds: `numbers` of the local shape, or flat with a span."""
        for offsets, part in self._parts(numbers):
            if self.cut is None:
                yield Box(tuple(a + b for a, b in zip(offsets, self.offsets, strict=True)), part)
            else:
                yield from self._apart(self.cut, Box(offsets, part))

    def _parts(self, numbers: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        if self.span is None:
            yield (0,) * len(self.local), numbers
            return
        at, flat = 0, numbers.reshape(-1)
        for offsets, sizes in flat_boxes(self.local, *self.span):
            count = prod(sizes)
            yield offsets, flat[at : at + count].view(sizes)
            at += count

    def _apart(self, shard: Shard, box: Box) -> Iterator[Box]:
        """Yield what lies side by side here, but is in different fused blocks of the full tensor."""
        dim, begin = shard.dim, 0
        for place in shard.places(self.shape[dim]):
            size = place.stop - place.start
            window = [0] * len(self.local), list(self.local)
            window[0][dim], window[1][dim] = begin, size
            here = box.within(*window)
            if here is not None:
                moved = list(here.offsets)
                moved[dim] += place.start - begin
                yield Box(tuple(moved), here.numbers)
            begin += size


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that the numbers [start, stop) of a tensor of this shape fill, in order."""
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
"""The name of the layout in a file's metadata."""

RUN = "quintsched.run"
"""The name there of the run that wrote the file, where it says so: files of two runs are of no one state."""


@dataclass(frozen=True)
class StateLayout:
    """What a rank's file says of its tensors.

    Attributes:
        replica: which replica of the batch the rank belonged to, and how many there were.
        placements: by tensor, where its numbers lie in the full one; what is not named is whole.
        beside: by tensor that has no place, how the weight is held that it belongs to.
        dtypes: by tensor, the type in which blocks compute with it, where it is kept in another ("bfloat16").
        own_names: what the model itself calls the weights, by our names, where that differs.
        same: names of ours that are one tensor.
    """

    replica: tuple[int, int] = (0, 1)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    beside: Mapping[str, Placement] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    own_names: Mapping[str, str] = field(default_factory=dict)
    same: Sequence[Sequence[str]] = ()

    def to_text(self) -> str:
        """Return the JSON text of it."""
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
        """Whether two ranks have cut their weights alike; what is kept beside a weight is cut as it is."""
        mine, theirs = ({n: p for n, p in one.placements.items() if n.startswith("model.")} for one in (self, other))
        return mine == theirs

    @classmethod
    def from_text(cls, text: str) -> StateLayout:
        """Return what `to_text` wrote; raises `InputError` with the place of the first fault."""
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
    version: Literal[1]
    replica: tuple[int, int]
    placements: list[Placement]
    tensors: dict[str, int]
    beside: dict[str, int]
    dtypes: dict[str, Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]]
    own_names: dict[str, str]
    same: list[list[str]]


def _require_consistent(placement: Placement) -> None:
    """Raise `InputError` for a placement that contradicts itself."""
    dims, cut = len(placement.shape), placement.cut
    if len(placement.local) != dims or len(placement.offsets) != dims or (cut is not None and cut.dim >= dims):
        raise InputError(f"a placement in {dims} dimensions has others")
    sizes = (*placement.shape, *placement.local, *placement.offsets, *(placement.span or ()))
    if min(sizes, default=0) < 0 or (cut is not None and (min(cut.dim, cut.index) < 0 or cut.size < 1)):
        raise InputError("a placement has a size below 0")
