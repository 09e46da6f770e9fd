"""What all ranks of a run have saved, as one state: any box of any tensor is read, and no more.

    files of another mesh     rank 0 [▓▓▓▓      ]   rank 1 [    ▓▓▓▓▓▓]      each file says where its numbers lie
    a box that is wanted             [   ▒▒▒▒▒  ]
    read                             [   ▒]            [    ▒▒▒▒]            of copies, those of the first file

Files are mapped into memory, so that only what is read of them is loaded. Nothing in a file is ever resolved to code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quintsched.errors import InputError, MisfitError

from ..blocks.number_types import require_kind, type_of
from ..interchange.boxes import Box, Placement
from ..interchange.save_dcp import STEP
from ..optim.loss_scale import SCALE
from ..state.state_dict import OPTIMIZER, STATES, require_states, same
from .layout import RUN, StateLayout, is_plain

MODEL, STATE, AVERAGE = "model.", OPTIMIZER, "ema."
"""How names begin: of weights and buffers, of what optimizers keep, of averages ("ema.0.<name>")."""

MOST_MAPPED = 2**25
"""How many bytes of a file are read before it is mapped anew: what was read would stay resident."""

_TOGETHER = "give the files that all ranks of one run have saved after the same step"


@dataclass(frozen=True)
class SavedPiece:
    """What one file has of a tensor."""

    path: Path
    name: str
    placement: Placement
    open_file: MappedFile

    def boxes(self) -> list[Box]:
        """Return the boxes of the full tensor that it fills; of their numbers only the places in the file are known."""
        if is_plain(self.placement):
            return [Box((0,) * len(self.placement.shape), self._outline())]
        return list(self.placement.boxes(self._outline()))

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers; raises `InputError` for one that cannot be read."""
        return type_of(self._slice().get_dtype(), f"{self.path}: {self.name!r}")

    def _outline(self) -> Tensor:
        return torch.empty(self._slice().get_shape(), device="meta")

    def read(self, part: Tensor) -> Tensor:
        """Return the numbers of a part of one of its boxes."""
        shape, start = self._slice().get_shape(), part.storage_offset()
        if not shape:
            return self.whole()
        self.open_file.count(part.numel() * part.element_size())
        if len(shape) == 1:  # boxes may be strided in it
            end = start + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)) + 1
            flat: Tensor = self._slice()[start:end]
            return flat.as_strided(part.shape, part.stride())
        places, step = [], part.new_empty(shape).stride()
        for size, stride, all_of_it in zip(part.shape, step, shape, strict=True):
            first = start // stride % all_of_it
            places.append(slice(first, first + size))
        found: Tensor = self._slice()[tuple(places)]
        return found

    def whole(self) -> Tensor:
        """Return the numbers as they are in the file: a copy, since a view would keep all of the file mapped."""
        found: Tensor = self.open_file.opened.get_tensor(self.name).clone()
        self.open_file.count(found.nbytes)
        return found

    def _slice(self) -> Any:
        return self.open_file.opened.get_slice(self.name)


class MappedFile:
    """A safetensors file, which is mapped anew now and then, so that little of what was read of it stays resident."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.opened = _opened(path)

    def count(self, num_bytes: int) -> None:
        """Note that so many bytes are read."""
        self._read += num_bytes
        if self._read > MOST_MAPPED:
            self.opened, self._read = _opened(self._path), 0

    def close(self) -> None:
        """Let go of it; tensors that somebody still has stay."""
        self.opened = None


class SavedState:
    """The state in the files of all ranks.

    Attributes:
        pieces: by name of a tensor, what files have of it, in their order.
        layouts: what each file says of itself.
        runs: by path, the run that wrote a file, where it says so.
        beside: states of optimizers that have no place in a whole tensor, by name.
        unplaced: files that do not say where their tensors lie, of which nothing is read.

    Raises `InputError` for a file that is damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.pieces: dict[str, list[SavedPiece]] = {}
        self.beside: dict[str, list[SavedPiece]] = {}
        self.layouts: list[StateLayout] = []
        self.runs: dict[Path, str] = {}
        self.unplaced: list[Path] = []
        self._stack = ExitStack()
        self._keys: dict[str, dict[str, None]] = {}
        for path in paths:
            self._add(path)
        for name in (*self.pieces, *self.beside):
            if name.startswith(STATE):
                weight, _, key = name.removeprefix(STATE).rpartition(".")
                self._keys.setdefault(weight, {})[key] = None

    def _add(self, path: Path) -> None:
        mapped = MappedFile(path)
        self._stack.callback(mapped.close)
        file = mapped.opened
        metadata = file.metadata() or {}
        layout = _read_layout(path, metadata)
        if RUN in metadata:
            self.runs[path] = metadata[RUN]
        if layout is None:
            self.unplaced.append(path)
            return
        self.layouts.append(layout)
        for name in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(name).get_shape())
            whole = Placement(shape, shape, (0,) * len(shape))
            if name in layout.beside:
                self.beside.setdefault(name, []).append(SavedPiece(path, name, layout.beside[name], mapped))
            else:
                piece = SavedPiece(path, name, layout.placements.get(name, whole), mapped)
                _require_sane(piece, shape)
                self.pieces.setdefault(name, []).append(piece)

    def __enter__(self) -> SavedState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pieces.clear()
        self.beside.clear()
        self._stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self.pieces[name][0].placement.shape

    def require_alike(self, name: str) -> None:
        """Raise `MisfitError` where ranks have kept other numbers of what is not cut."""
        pieces = [piece for piece in self.pieces.get(name, ()) if is_plain(piece.placement)]
        if any(not same(piece.whole(), pieces[0].whole()) for piece in pieces[1:]):
            raise MisfitError(
                f"{self.paths[0].parent}: {name!r} is not the same on all ranks that saved it, so that nobody can say "
                "what it is on another mesh; resume on the mesh that wrote it"
            )

    def require_one_save(self) -> None:
        """Raise `MisfitError` for files that were not saved together: of other steps, or of other runs.

        A kill between the saves of two ranks leaves such.
        """
        self._require_equal(STEP, "step")
        for piece in self.pieces.get(STATES, ()):
            require_states(piece.whole(), {*self.pieces, *self.beside}, str(piece.path))
        for path, run in self.runs.items():
            first, its = next(iter(self.runs.items()))
            if run != its:
                raise MisfitError(f"{first} is of run {its}, but {path} of run {run}; {_TOGETHER}")
        for name in self.pieces:
            if name == SCALE or (name.startswith(AVERAGE) and name.count(".") == 2):
                self._require_equal(name, name)

    def _require_equal(self, name: str, called: str) -> None:
        """Raise `MisfitError` unless all files that have a value have the same."""
        values = [(piece.path, piece.whole()) for piece in self.pieces.get(name, ())]
        for path, value in values[1:]:
            first, its = values[0]
            if not same(value, its):
                raise MisfitError(
                    f"{first} is of {called} {_said(its)}, but {path} of {called} {_said(value)}; {_TOGETHER}"
                )

    def require_kind(self, name: str, weight: str, wanted: torch.dtype) -> None:
        """Raise `MisfitError` where a tensor has numbers of another kind than the weight that is to have them."""
        for piece in self.pieces[name]:
            require_kind(str(piece.path), name.removeprefix(MODEL), piece.dtype, weight, wanted)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        return self.pieces[name][0].dtype

    @property
    def has_states(self) -> bool:
        """Whether optimizers have kept anything."""
        return bool(self._keys)

    def keys_of(self, weight: str) -> list[str]:
        """Return the keys of what optimizers keep for a weight: "exp_avg", "step"."""
        return list(self._keys.get(weight, ()))

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Read into boxes; raises `InputError` where files do not have all of them."""
        left = [box for box in boxes if box.numbers.numel()]
        for piece in self.pieces[name]:
            for region in piece.boxes() if left else ():
                left = [rest for box in left for rest in _take(piece, region, box)]
        if left:
            raise InputError(f"{self.paths[0].parent}: the files do not have all numbers of {name!r}")

    def of_replica(self, name: str, replica: int, num_replicas: int) -> Tensor | None:
        """Return what a rank of a replica has kept for itself; None where there were not as many replicas."""
        for piece in self.pieces.get(name, ()):
            if self.layouts[self.paths.index(piece.path)].replica == (replica, num_replicas):
                return piece.whole()
        return None

    def whole(self, name: str) -> Tensor:
        """Return a full tensor."""
        first = self.pieces[name][0]
        if is_plain(first.placement):
            return first.whole()
        full = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill(name, [Box((0,) * full.dim(), full)])
        return full


def _said(value: Tensor) -> str:
    return ", ".join(f"{number:g}" for number in value.reshape(-1).tolist())


def _opened(path: Path) -> Any:
    """Return an open safetensors file; raises `InputError` for what is none."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a safetensors file: {error}") from error


def _read_layout(path: Path, metadata: Mapping[str, str]) -> StateLayout | None:
    """Return what the metadata of a file say of its tensors; None where they say nothing."""
    try:
        return StateLayout.of_metadata(metadata)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _require_sane(piece: SavedPiece, shape: tuple[int, ...]) -> None:
    """Raise `InputError` where a tensor is not as long as its layout says."""
    placement = piece.placement
    held = placement.local if placement.span is None else (placement.span[1] - placement.span[0],)
    if shape != held:
        raise InputError(f"{piece.path}: {piece.name!r} is {shape}, but its layout says {held}")


def _take(piece: SavedPiece, region: Box, box: Box) -> Iterator[Box]:
    """Read into a box what a piece has of it in one of its regions, and yield what is left of the box."""
    common = box.within(region.offsets, region.numbers.shape)
    if common is None:
        yield box
        return
    inside = region.within(common.offsets, common.numbers.shape)
    assert inside is not None
    common.numbers.copy_(piece.read(inside.numbers))
    yield from box.without(common)
