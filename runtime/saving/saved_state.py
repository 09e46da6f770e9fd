"""A saved state as one object, wherever its parts are stored: any box of any tensor is read without the rest.

    files of another mesh     rank 0 [▓▓▓▓      ]   rank 1 [    ▓▓▓▓▓▓]      each records the place of its numbers
    a requested box                  [   ▒▒▒▒▒  ]
    read                             [   ▒]            [    ▒▒▒▒]            of replicated ones, those of the first file

Its pieces are tensors of ranks' files, chunks of PyTorch's distributed checkpoints (`dcp`), tensors of transformers'
files (`pretrained`), or tensors of this process: the same code reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from quintsched.errors import InputError, MisfitError

from ..blocks.dtype_names import require_kind
from ..optim.loss_scale import SCALE
from ..weights_and_gradients.rank_state_dict import STATES, require_states, same
from .index_ranges_in_full_tensors import LAYOUT, RUN, Range, StateLayout, TensorPiece, TensorPlacement
from .lazy_tensors import MappedFile, StoredTensor, of_memory

MODEL, STATE, AVERAGE = "model.", "optimizer.", "ema."
"""Prefixes of names: of weights and buffers, of optimizers' states, of averages ("ema.0.<name>")."""

STEP = "engine.step"
"""Name of the number of steps made, which every state of a training has."""

WINDOW_BYTES = 2**26
"""Most bytes of a tensor that are read at once where it is streamed."""

_TOGETHER = "give the files that all ranks of one run have saved after the same step"

ShapesByName = Mapping[str, tuple[int, ...]]


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the prefix of a name, its weight, and the key of the optimizer's state, if it is one.

    "optimizer.3.weight.exp_avg" is ("optimizer.", "3.weight", "exp_avg"); a name without a weight is (name, "", "").
    """
    if name.startswith(STATE):
        weight, _, key = name.removeprefix(STATE).rpartition(".")
        return STATE, weight, key
    if name.startswith(MODEL):
        return MODEL, name.removeprefix(MODEL), ""
    if name.startswith(AVERAGE) and name.count(".") > 2:
        _, number, weight = name.split(".", 2)
        return f"{AVERAGE}{number}.", weight, ""
    return name, "", ""


@dataclass(frozen=True)
class SavedPiece:
    """A part of a tensor, or all of it: `name` is that by which it is stored, `layout` that of its file."""

    name: str
    placement: TensorPlacement
    stored: StoredTensor
    layout: StateLayout
    where: str

    def boxes(self) -> Iterator[TensorPiece]:
        """Yield the boxes of the full tensor that it fills; of files as meta tensors, which give only their places."""
        memory = self.stored.memory
        return self.placement.boxes(torch.empty(self.placement.held, device="meta") if memory is None else memory)

    def read_part(self, part: Tensor) -> Tensor:
        """Return the numbers of a part of one of its boxes."""
        if not part.is_meta:
            return part
        shape, start = self.placement.held, part.storage_offset()
        if len(shape) == 1:  # a flat range: boxes may be strided in it
            end = start + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)) + 1
            return self.stored.read((slice(start, end),)).as_strided(part.shape, part.stride())
        places = []
        for size, stride, all_of_it in zip(part.shape, part.new_empty(shape).stride(), shape, strict=True):
            first = start // stride % all_of_it
            places.append(slice(first, first + size))
        return self.stored.read(tuple(places))

    def whole(self) -> Tensor:
        """Return the numbers as they are stored."""
        return self.stored.read(tuple(slice(0, size) for size in self.stored.shape))


class SavedState:
    """The state that files, or tensors, make together.

    Attributes:
        where: its location, for messages.
        pieces: by name of a tensor, its pieces.
        beside: states of optimizers that have no place in a full tensor, by name.
        values: states of optimizers that are no tensors, by name, as functions that read them.
        layouts: the layout of each file.
        unplaced: files without a layout, of which nothing is read.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.pieces: dict[str, list[SavedPiece]] = {}
        self.beside: dict[str, list[SavedPiece]] = {}
        self.values: dict[str, Callable[[], object]] = {}
        self.layouts: list[StateLayout] = []
        self.unplaced: list[Path] = []
        self._runs: dict[Path, str] = {}

    @classmethod
    def of_files(
        cls, paths: Sequence[Path], layout_of: Callable[[ShapesByName], StateLayout] | None = None
    ) -> SavedState:
        """Return the state in the files of ranks; `layout_of` makes the layout of a file that records none.

        Raises `InputError` for a file that is damaged.
        """
        saved = cls(str(paths[0].parent) if len(paths) else "the state")
        for path in paths:
            file = MappedFile(path)
            metadata, tensors = file.opened.metadata() or {}, file.tensors()
            try:
                layout = StateLayout.from_text(metadata[LAYOUT]) if LAYOUT in metadata else None
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
            if layout is None and layout_of is not None:
                layout = layout_of({name: tensor.shape for name, tensor in tensors.items()})
            if RUN in metadata:
                saved._runs[path] = metadata[RUN]
            if layout is None:
                saved.unplaced.append(path)
            else:
                saved._add_rank(tensors, layout, str(path))
        return saved

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], layout: StateLayout | None = None) -> SavedState:
        """Return the state that tensors of this process make; without a layout they are whole.

        Raises `MisfitError` where a tensor has another shape than the layout.
        """
        saved = cls("the state")
        try:
            saved._add_rank({n: of_memory(t) for n, t in tensors.items()}, layout or StateLayout(), "the state")
        except InputError as error:
            raise MisfitError(str(error)) from None
        return saved

    def _add_rank(self, tensors: Mapping[str, StoredTensor], layout: StateLayout, where: str) -> None:
        """Add the tensors of one rank; raises `InputError` where a tensor has another shape than its layout."""
        self.layouts.append(layout)
        for name, stored in tensors.items():
            if name in layout.beside:
                piece = SavedPiece(name, layout.beside[name], stored, layout, where)
                self.beside.setdefault(name, []).append(piece)
                continue
            shape = stored.shape
            piece = SavedPiece(name, layout.placements.get(name, TensorPlacement.whole(shape)), stored, layout, where)
            if shape != piece.placement.held:
                raise InputError(f"{where}: {name!r} is {shape}, but its layout says {piece.placement.held}")
            self.pieces.setdefault(name, []).append(piece)

    def add_piece(self, called: str, name: str, placement: TensorPlacement, stored: StoredTensor) -> None:
        """Add a piece of the tensor `called`, which a file stores as `name`."""
        self.pieces.setdefault(called, []).append(SavedPiece(name, placement, stored, StateLayout(), self.where))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self.pieces[name][0].placement.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.pieces[name][0].stored.dtype

    @cached_property
    def states(self) -> dict[str, list[str]]:
        """Keys of the optimizers' states, by weight: "exp_avg", "step"."""
        found: dict[str, dict[str, None]] = {}
        for name in (*self.pieces, *self.beside, *self.values):
            kind, weight, key = parts_of(name)
            if kind == STATE:
                found.setdefault(weight, {})[key] = None
        return {weight: list(keys) for weight, keys in found.items()}

    def require_alike(self, name: str) -> None:
        """Raise `MisfitError` where a tensor that is not sharded differs between ranks."""
        pieces = [piece for piece in self.pieces.get(name, ()) if piece.placement.is_plain]
        if any(not same(piece.whole(), pieces[0].whole()) for piece in pieces[1:]):
            raise MisfitError(
                f"{self.where}: {name!r} is not the same on all ranks that saved it, so that nobody can say "
                "what it is on another mesh; resume on the mesh that wrote it"
            )

    def require_one_save(self) -> None:
        """Raise `MisfitError` for files that were not saved together: of different steps or runs.

        A kill between the saves of two ranks leaves such files.
        """
        self._require_equal(STEP, "step")
        for piece in self.pieces.get(STATES, ()):
            require_states(piece.whole(), {*self.pieces, *self.beside}, piece.where)
        for path, run in self._runs.items():
            first, its = next(iter(self._runs.items()))
            if run != its:
                raise MisfitError(f"{first} is of run {its}, but {path} of run {run}; {_TOGETHER}")
        for name in self.pieces:
            if name == SCALE or (name.startswith(AVERAGE) and name.count(".") == 2):
                self._require_equal(name, name)

    def _require_equal(self, name: str, called: str) -> None:
        """Raise `MisfitError` unless a value is equal in all files that have it."""
        pieces = self.pieces.get(name, [])
        for piece in pieces[1:]:
            mine, its = pieces[0].whole(), piece.whole()
            if not same(mine, its):
                first, other = pieces[0].where, piece.where
                raise MisfitError(
                    f"{first} is of {called} {_words(mine)}, but {other} of {called} {_words(its)}; {_TOGETHER}"
                )

    def require_kind(self, name: str, weight: str, wanted: torch.dtype) -> None:
        """Raise `MisfitError` where a tensor has another kind of dtype than the weight it is for."""
        for piece in self.pieces[name]:
            require_kind(piece.where, piece.name.removeprefix(MODEL), piece.stored.dtype, weight, wanted)

    def fill(self, name: str, boxes: Sequence[TensorPiece]) -> None:
        """Read into boxes; raises `InputError` where pieces do not cover them."""
        left = [box for box in boxes if box.numbers.numel()]
        for piece in self.pieces[name]:
            for region in piece.boxes() if left else ():
                left = [rest for box in left for rest in _take(piece, region, box)]
        if left:
            raise InputError(f"{self.where}: the files do not have all numbers of {name!r}")

    def whole(self, name: str) -> Tensor:
        """Return a full tensor."""
        first = self.pieces[name][0]
        if first.placement.is_plain:
            return first.whole()
        full = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill(name, [TensorPiece((0,) * full.dim(), full)])
        return full

    def windows(self, name: str, span: Range | None = None) -> Iterator[Tensor]:
        """Yield the flat numbers of a full tensor, or a range of them, some at a time."""
        shape, dtype = self.shape(name), self.dtype(name)
        first, last = span or (0, prod(shape))
        step = max(WINDOW_BYTES // dtype.itemsize, 1)
        for start in range(first, last, step):
            window = (start, min(start + step, last))
            flat = torch.empty(window[1] - start, dtype=dtype)
            self.fill(name, list(TensorPlacement.whole(shape, window).boxes(flat)))
            yield flat

    def of_replica(self, name: str, replica: int, num_replicas: int) -> Tensor | None:
        """Return a tensor that a rank of this replica saved for itself; None where there were not as many replicas."""
        pieces = (piece for piece in self.pieces.get(name, ()) if piece.layout.replica == (replica, num_replicas))
        return next((piece.whole() for piece in pieces), None)


def _take(piece: SavedPiece, region: TensorPiece, box: TensorPiece) -> Iterator[TensorPiece]:
    """Read into a box its overlap with a region of a piece, and yield the rest of the box."""
    common = box.within(region.offsets, region.numbers.shape)
    if common is None:
        yield box
        return
    inside = region.within(common.offsets, common.numbers.shape)
    assert inside is not None
    common.numbers.copy_(piece.read_part(inside.numbers))
    yield from box.without(common)


def _words(value: Tensor) -> str:
    return ", ".join(f"{number:g}" for number in value.reshape(-1).tolist())
