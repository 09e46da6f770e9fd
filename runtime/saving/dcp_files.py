"""The files of PyTorch's distributed checkpoint: what each rank wrote, and one table of where everything lies.

    __0_0.distcp   [tensor][tensor][value] …     each saved by torch.save, one after the other
    __1_0.distcp   [tensor] …
    .metadata      name ─▶ shape, type, chunks (offsets, sizes);  (name, offsets) ─▶ file, first byte, length

The table is a pickle, and a pickle may run whatever its writer wants. Ours is read by an unpickler that knows the few
classes of the format and refuses any other; tensors and values are read by torch.load with `weights_only`.

Source: PyTorch's `torch.distributed.checkpoint` (`metadata`, `filesystem`).
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

from quintsched.errors import InputError
from quintsched.files.atomic import read_whole, write_whole

from .placement import Box
from .stored_tensors import StoredTensor

TABLE = ".metadata"
MOST_BYTES = 2**30
"""The longest table that is read."""
VERSION = "1.0.0"


class Entry(NamedTuple):
    """One piece that lies in a file; tensors that are one go by several `names`.

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
    """Writes pieces to an open file, and notes where they are in `entries`."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self.entries: list[Entry] = []

    def write_boxes(self, names: Sequence[str], boxes: Iterable[Box], shape: Sequence[int]) -> None:
        """Write boxes of a full tensor."""
        for box in boxes:
            start, length = self._append(box.numbers.detach().cpu().clone())
            kind, sizes = str(box.numbers.dtype).removeprefix("torch."), tuple(box.numbers.shape)
            self.entries.append(Entry(names, self._name, start, length, tuple(shape), kind, box.offsets, sizes))

    def write_value(self, names: Sequence[str], value: object) -> None:
        """Write a value that is no tensor, or a tensor as a whole."""
        if isinstance(value, Tensor):
            self.write_boxes(names, [Box((0,) * value.dim(), value)], value.shape)
        else:
            self.entries.append(Entry(names, self._name, *self._append(value)))

    def _append(self, value: object) -> tuple[int, int]:
        """Save something at the end of the file; return its first byte and its length."""
        start, saved = self._file.tell(), io.BytesIO()
        torch.save(value, saved)
        self._file.write(saved.getbuffer())
        return start, self._file.tell() - start


def write_table(folder: Path, entries: Sequence[Entry]) -> None:
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
    paths = {name: tuple(name.split(".", 1)) for name in tensors}  # where it is in the nested state that PyTorch makes
    table = Metadata(tensors, paths, homes, StorageMeta(), VERSION)
    write_whole(folder / TABLE, pickle.dumps(table), "the checkpoint", durable=True)


def read_table(folder: Path) -> Metadata:
    """Return the table of a checkpoint.

    Raises `UsageError` where there is none, `InputError` where it holds anything but such a table.
    """
    path = folder / TABLE
    data = read_whole(path, MOST_BYTES, "the table of torch.distributed.checkpoint")
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
    """Stand in for a path: where a checkpoint once lay."""
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
    """Knows the classes of the format, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise InputError(f"it names {module}.{name}, which does not belong there and is not loaded")


@dataclass
class DcpReader:
    """Reads pieces of the files of a checkpoint; of tensors it keeps the last one, of which several boxes may be."""

    folder: Path
    table: Metadata
    _last: tuple[MetadataIndex | None, object] = field(default=(None, None))

    def read(self, index: MetadataIndex) -> Any:
        """Return a piece, or a value; raises `InputError` for one that is not there, damaged, or no plain data."""
        if self._last[0] == index:
            return self._last[1]
        place = self.table.storage_data.get(index)
        if place is None:
            raise InputError(f"{self.folder / TABLE}: it does not say where {index.fqn!r} lies")
        name = place.relative_path
        if Path(name).name != name or getattr(place, "transform_descriptors", None):
            raise InputError(f"{self.folder / TABLE}: {name!r} is not the name of a plain file beside it")
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
    """Return a chunk of a tensor, which is loaded as a whole."""

    def read(places: tuple[slice, ...]) -> Tensor:
        found = reader.read(MetadataIndex(name, offsets))
        if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
            raise InputError(f"{reader.folder}: the chunk of {name!r} at {offsets} is not what {TABLE} says")
        return found[places]

    return StoredTensor(lambda: (sizes, dtype), read)
