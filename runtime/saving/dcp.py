"""PyTorch's distributed checkpoint format (DCP), which any mesh reads, and plain PyTorch as well.

    model.<name>                            masters where there are any, and buffers, under the model's own names
    optimizer.state.<name>.<key>            the optimizer's state of a weight
    optimizer.param_groups.<name>.<key>     the settings of its parameter group
    engine.optimizer.…, engine.module.…     further state of optimizers and modules (`rank_state_dict`)
    engine.step                             number of steps made

These are the keys of `get_state_dict` of `torch.distributed.checkpoint.state_dict` with `flatten_optimizer_state_dict`.
Each rank writes the boxes that it holds; of replicated ones, the first rank's. A rank that reads takes the overlap of
its own boxes with those in the files, so that a checkpoint of one mesh, or of FSDP, fits any other.

Files of a distributed checkpoint: the data that each rank wrote, and one table of contents.

    __0_0.distcp   [tensor][tensor][value] …     each saved by torch.save, one after the other
    __1_0.distcp   [tensor] …
    .metadata      name ─▶ shape, type, chunks (offsets, sizes);  (name, offsets) ─▶ file, first byte, length

The table is a pickle, and a pickle can run arbitrary code. It is read here by an unpickler that knows the few classes
of the format and refuses any other; tensors and values are read by torch.load with `weights_only`.

Source: PyTorch's `torch.distributed.checkpoint` (`metadata`, `filesystem`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from quintsched.errors import InputError, MisfitError
from quintsched.files.atomic import read_whole, write_whole, writing

from ..blocks.plain_values_as_tensors import is_text, quoted
from ..optim.optimizer_state import SCALARS, flat_of
from ..weights_and_gradients.rank_state_dict import require_alike
from ..weights_and_gradients.training_state import KeptState
from .atomic_output_folder import replace_folder, standing
from .index_ranges_in_full_tensors import TensorPiece, TensorPlacement
from .lazy_tensors import StoredTensor
from .load_state import StateLoader
from .pretrained.foreign_names import find_prefix, require_names
from .pretrained.load_pretrained import LoadedWeights
from .rank_tensor_inventory import HeldTensor, RankTensors, sizes_of, state_placement
from .saved_state import MODEL, STEP, SavedState
from .saved_state import STATE as OURS

STATE, GROUPS = "optimizer.state.", "optimizer.param_groups."
FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata")

UNSAVED = ("params", "param_names")
"""Keys of parameter groups that name parameters, and are no settings."""


def save_dcp(path: Path, rank: RankTensors, beside: Mapping[str, object]) -> None:
    """Write the folder; see `EngineSaves.save_dcp`. All ranks call this; `beside` are values of this rank's own."""
    replace_folder(path, "the checkpoint", rank.everyone, FILES, dcp_writer(rank, beside))


def dcp_writer(rank: RankTensors, beside: Mapping[str, object]) -> Callable[[Path], None]:
    """Return a collective function that writes this rank's file, on the first rank also the table, into a folder.

    All ranks call this. Raises, on all ranks alike, `MisfitError` for state that has no place in a full tensor.
    """
    everyone, number = rank.everyone, rank.number
    kept_beside = everyone.together(rank.training.beside.read_tensors)
    require_alike(kept_beside, rank.groups.world)
    everyone.together(lambda: _require_places(rank))
    values = {**({STEP: torch.tensor(rank.steps.total)} if number == 0 else {}), **kept_beside, **beside}

    def write(folder: Path) -> None:
        entries = everyone.together(lambda: _write_file(folder / file_name(number), rank, values))
        mine = json.dumps(entries).encode()
        shared = [PieceRow(*fields) for theirs in everyone.share_bytes(mine) for fields in json.loads(theirs)]
        everyone.together(lambda: write_table(folder, shared) if number == 0 else None)

    return write


def _first_held(rank: RankTensors) -> list[HeldTensor]:
    """Return this rank's tensors, each once; of replicated ones, only the first copy is to be written (`speaks`)."""
    held, further = rank.held(), {name for group in rank.names.same() for name in group[1:]}
    firsts = {id(one.tensor): one for one in reversed(held)}
    firsts |= {id(one.tensor): one for one in reversed(held) if one.name not in further}
    return [
        replace(one, speaks=one.speaks and one.name not in further and rank.is_first_twin(one))
        for one in firsts.values()
    ]


def _require_places(rank: RankTensors) -> None:
    """Raise `MisfitError` for optimizer state whose place in the full tensor is unknown."""
    sizes = sizes_of(rank.tensors())
    for name, placement in rank.placements(sizes)[1].items():
        if not is_text(name):
            raise MisfitError(
                f"{name!r} is {sizes[name]}, its weight here {placement.held}: a shard of such a state has no place in "
                "a whole one; save with checkpoint.format: native"
            )


def _write_file(path: Path, rank: RankTensors, values: Mapping[str, object]) -> list[PieceRow]:
    names = rank.names.dcp_names()
    with writing(path, "the checkpoint"), path.open("wb") as file:
        writer = DcpWriter(file, path.name)
        for one in _first_held(rank):
            if not one.speaks:
                continue
            writer.write_boxes([MODEL + name for name in names[one.name]], one.boxes(), one.placement.shape)
            kept = rank.kept(one)
            if kept is not None and (kept.is_shard or rank.groups.tensor.index == 0):
                _write_kept(writer, names[one.name], one, kept)
        for name, value in values.items():
            writer.write_value([name], value)
        file.flush()
        os.fsync(file.fileno())
    return writer.entries


def _write_kept(writer: DcpWriter, names: Sequence[str], one: HeldTensor, kept: KeptState) -> None:
    """Write an optimizer's state of a weight; numbers and strings as they are, since PyTorch loads them so."""
    placement = state_placement(one, kept)
    plain = {quoted(key): value for key, value in kept.state.items() if type(key) is str and type(value) in SCALARS}
    others = {key: value for key, value in kept.state.items() if type(key) is not str or type(value) not in SCALARS}
    for key, value in {**plain, **flat_of(others, one.name)}.items():
        called = [f"{STATE}{name}.{key}" for name in names]
        if isinstance(value, Tensor) and tuple(value.shape) == placement.held and not is_text(key):
            writer.write_boxes(called, placement.boxes(value), placement.shape)
        else:
            writer.write_value(called, value)
    for key, value in kept.group.items():
        if key not in UNSAVED:
            writer.write_value([f"{GROUPS}{name}.{key}" for name in names], value)


def load_dcp(
    path: Path,
    rank: RankTensors,
    *,
    fresh: Sequence[str] = (),
    strict: bool = True,
    optimizer: bool = True,
    beside: Sequence[str] = (),
    fetch: Callable[[str], None] = lambda _: None,
) -> LoadedWeights:
    """Load a checkpoint into this rank's tensors; see `EngineSaves.load_dcp`. All ranks call this.

    `fetch` makes a file of the folder readable, before this rank first reads it.
    """
    everyone = rank.everyone
    path = standing(path, says=everyone.is_first)
    everyone.together(lambda: fetch(TABLE))
    table = everyone.together(lambda: read_table(path))
    reader, calls = DcpReader(path, table, fetch), rank.names.dcp_names()
    prefix = find_prefix((name for names in calls.values() for name in names), table.state_dict_metadata)
    saved = SavedState(str(path))
    in_states = replace(prefix, adds=prefix.adds.removeprefix(MODEL))
    ours = {prefix.in_file(name): MODEL + one for one, names in calls.items() for name in reversed(names)}
    weights = {in_states.in_file(name): one for one, names in calls.items() for name in reversed(names)}
    for name, kind in table.state_dict_metadata.items():
        called: str | None = ours.get(name, None if name.startswith(MODEL) else name)
        if name.startswith(STATE):
            weight, _, key = name.removeprefix(STATE).rpartition(".")
            called = f"{OURS}{weights[weight]}.{key}" if optimizer and weight in weights else None
        if called is None or name.startswith(GROUPS):
            continue
        if isinstance(kind, TensorStorageMetadata):
            for chunk in kind.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                stored = chunk_of(reader, name, offsets, sizes, kind.properties.dtype)
                saved.add_piece(called, name, TensorPlacement(tuple(kind.size), sizes, offsets), stored)
        else:
            saved.values[called] = partial(reader.read_piece, MetadataIndex(name))
    fresh = rank.names.may_stay(fresh)
    tensors = {n: k for n, k in table.state_dict_metadata.items() if isinstance(k, TensorStorageMetadata)}
    lacking: dict[str, str] = {}
    for one, names in calls.items():
        if not any(prefix.in_file(name) in tensors for name in names):
            lacking.setdefault(prefix.in_file(names[0]), one)
    unused = require_names(
        path, [name for name in tensors if name.startswith(MODEL)], ours.keys(), lacking, fresh, strict=strict
    )
    StateLoader(saved, rank, is_part=True, takes_states=optimizer).load_state(everyone.together)
    everyone.together(lambda: rank.take_progress(saved))
    values = everyone.together(lambda: {name: saved.values[name]() for name in beside if name in saved.values})
    return LoadedWeights(tuple(lacking.values()), unused, {**dict.fromkeys(beside), **values})


TABLE = ".metadata"
MOST_TABLE_BYTES = 2**30
"""Longest table that is read, in bytes."""
DCP_VERSION = "1.0.0"


class PieceRow(NamedTuple):
    """Table row of one piece in a file; tied tensors have several `names`.

    `shape` is that of the full tensor, None for a value that is none; `offsets` and `sizes` are those of the piece.
    """

    names: Sequence[str]
    file: str
    start: int
    length: int
    shape: Sequence[int] | None = None
    dtype: str = ""
    offsets: Sequence[int] = ()
    sizes: Sequence[int] = ()


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


class DcpWriter:
    """Writes pieces to an open file, and records their places in `entries`."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self.entries: list[PieceRow] = []

    def write_boxes(self, names: Sequence[str], boxes: Iterable[TensorPiece], shape: Sequence[int]) -> None:
        """Write boxes of a full tensor."""
        for box in boxes:
            start, length = self._append(box.numbers.detach().cpu().clone())
            kind, sizes = str(box.numbers.dtype).removeprefix("torch."), tuple(box.numbers.shape)
            self.entries.append(PieceRow(names, self._name, start, length, tuple(shape), kind, box.offsets, sizes))

    def write_value(self, names: Sequence[str], value: object) -> None:
        """Write a value that is no tensor, or a tensor as a whole."""
        if isinstance(value, Tensor):
            self.write_boxes(names, [TensorPiece((0,) * value.dim(), value)], value.shape)
        else:
            self.entries.append(PieceRow(names, self._name, *self._append(value)))

    def _append(self, value: object) -> tuple[int, int]:
        """Save an object at the end of the file; return its first byte and its length."""
        start, saved = self._file.tell(), io.BytesIO()
        torch.save(value, saved)
        self._file.write(saved.getbuffer())
        return start, self._file.tell() - start


def write_table(folder: Path, entries: Sequence[PieceRow]) -> None:
    """Write the table of all ranks' pieces; of a piece that several ranks wrote, the first one counts."""
    tensors: dict[str, metadata.STORAGE_TYPES] = {}
    homes = {}
    for entry in entries:
        for name in entry.names:
            index = MetadataIndex(name, None if entry.shape is None else entry.offsets)
            if index in homes:
                continue
            homes[index] = filesystem._StorageInfo(entry.file, entry.start, entry.length)
            if entry.shape is None:
                tensors[name] = BytesStorageMetadata()
                continue
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            known = tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(entry.shape), []))
            assert isinstance(known, TensorStorageMetadata)
            known.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
    paths = {name: tuple(name.split(".", 1)) for name in tensors}  # paths in the nested dict that PyTorch builds
    table = Metadata(tensors, paths, homes, StorageMeta(), DCP_VERSION)
    write_whole(folder / TABLE, pickle.dumps(table), "the checkpoint", durable=True)


def read_table(folder: Path) -> Metadata:
    """Return the table of a checkpoint.

    Raises `UsageError` where there is none, `InputError` for a file that is no such table.
    """
    path = folder / TABLE
    data = read_whole(path, MOST_TABLE_BYTES, "the table of torch.distributed.checkpoint")
    try:
        table = _Unpickler(io.BytesIO(data)).load()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        raise InputError(f"{path}: not a table of torch.distributed.checkpoint: {error}") from error
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise InputError(f"{path}: not a table of torch.distributed.checkpoint's files")
    for name, kind in table.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(kind, TensorStorageMetadata | BytesStorageMetadata):
            raise InputError(f"{path}: {name!r} is neither a tensor nor a value")
    return table


def _path(*parts: str) -> str:
    """Stand in for pathlib's classes while unpickling: join the parts of a path."""
    return "/".join(map(str, parts))


_KNOWN: Mapping[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    (filesystem.__name__, "_StoragePrefix"): filesystem._StoragePrefix,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{("pathlib", kind): _path for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")},
    **{("pathlib._local", kind): _path for kind in ("PosixPath", "WindowsPath")},
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves the classes of the format, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise InputError(f"it names {module}.{name}, which does not belong there and is not loaded")


@dataclass
class DcpReader:
    """Reads pieces of a checkpoint's files; caches the last tensor, which may be read for several boxes.

    `fetch` is called with the name of a file before that is read.
    """

    folder: Path
    table: Metadata
    fetch: Callable[[str], None]
    _last: tuple[MetadataIndex | None, object] = field(default=(None, None))

    def read_piece(self, index: MetadataIndex) -> Any:
        """Return a piece, or a value; raises `InputError` for one that is missing, damaged, or no plain data."""
        if self._last[0] == index:
            return self._last[1]
        place = self.table.storage_data.get(index)
        if place is None:
            raise InputError(f"{self.folder / TABLE}: it has no place of {index.fqn!r}")
        name = place.relative_path
        if Path(name).name != name or getattr(place, "transform_descriptors", None):
            raise InputError(f"{self.folder / TABLE}: {name!r} is not the name of a plain file beside it")
        self.fetch(name)
        try:
            with open(self.folder / name, "rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except OSError as error:
            raise InputError(f"{self.folder / name}: cannot read it: {error.strerror}") from error
        try:
            found: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise InputError(f"{self.folder / name}: {index.fqn!r} is damaged, or no plain data: {error}") from error
        self._last = (index, found)
        return found


def chunk_of(
    reader: DcpReader, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> StoredTensor:
    """Return a chunk of a tensor as stored; reading any part of it loads the whole chunk."""

    def read(places: tuple[slice, ...]) -> Tensor:
        found = reader.read_piece(MetadataIndex(name, offsets))
        if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
            raise InputError(f"{reader.folder}: the chunk of {name!r} at {offsets} is not what {TABLE} says")
        return found[places]

    return StoredTensor(lambda: (sizes, dtype), read)
