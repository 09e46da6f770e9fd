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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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

TABLE = ".metadata"
MOST_BYTES = 2**30
"""The longest table that is read."""
VERSION = "1.0.0"
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One piece that lies in a file.

    Attributes:
        names: what it is part of; tensors that are one go by several.
        file: the file's name.
        start: its first byte there.
        length: how many bytes it has.
        shape: of the full tensor; None for a value that is no tensor.
        dtype: the tensor's type, in the letters of torch ("float32").
        offsets: where the piece begins in the full tensor.
        sizes: its shape.
    """

    names: tuple[str, ...]
    file: str
    start: int
    length: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def append(file: BinaryIO, value: object) -> tuple[int, int]:
    """Save a tensor or another value at the end of a file; return its first byte and its length."""
    start = file.tell()
    saved = io.BytesIO()
    torch.save(value.detach().cpu().clone() if isinstance(value, Tensor) else value, saved)
    file.write(saved.getbuffer())
    return start, file.tell() - start


def write_table(folder: Path, entries: Sequence[Entry], paths: Mapping[str, Path_]) -> None:
    """Write the table of all ranks' pieces; of a piece that several ranks wrote, the first one counts.

    `paths` says where each name is in the nested state that it stands for: ("optimizer", "state.0.weight.step").
    """
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
    table = Metadata(tensors, dict(paths), homes, StorageMeta(), VERSION)
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


class PieceReader:
    """Reads pieces of the files of a checkpoint; each file is opened once. Use it as a context."""

    def __init__(self, folder: Path, table: Metadata) -> None:
        self._folder, self._table = folder, table
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self._open.values():
            file.close()

    def chunks(self, name: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield (offsets, sizes) of the chunks of a tensor."""
        for chunk in self._table.state_dict_metadata[name].chunks:  # type: ignore[union-attr]
            yield tuple(chunk.offsets), tuple(chunk.sizes)

    def chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a chunk of a tensor."""
        found = self._load(MetadataIndex(name, offsets))
        if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
            raise InputError(f"{self._folder}: the chunk of {name!r} at {offsets} is not what {TABLE} says")
        return found

    def value(self, name: str) -> object:
        """Return a value that is no tensor."""
        return self._load(MetadataIndex(name))

    def _load(self, index: MetadataIndex) -> object:
        place = self._table.storage_data.get(index)
        if place is None:
            raise InputError(f"{self._folder / TABLE}: it does not say where {index.fqn!r} lies")
        name = place.relative_path
        if Path(name).name != name or getattr(place, "transform_descriptors", None):
            raise InputError(f"{self._folder / TABLE}: {name!r} is not the name of a plain file beside it")
        try:
            if name not in self._open:
                self._open[name] = open(self._folder / name, "rb")  # noqa: SIM115
            file = self._open[name]
            file.seek(place.offset)
            data = file.read(place.length)
        except OSError as error:
            raise InputError(f"{self._folder / name}: cannot read it: {error.strerror}") from error
        try:
            found: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise InputError(f"{self._folder / name}: {index.fqn!r} is damaged, or no plain data: {error}") from error
        return found
