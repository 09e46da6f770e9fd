"""Streaming writer of safetensors files: only one block of a tensor has to be in the host's memory.

    length of the header (8 bytes) │ {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …} │ memory

The library's own writer needs all tensors of a file in memory, twice; it reads the files written here.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from quintsched.errors import InputError, counted
from quintsched.files.read_plain_files_only import fill, open_plain

from ..blocks.dtype_names import name_of

BYTES_AT_ONCE = 2**24
"""Bytes that are read, written and hashed at a time."""

WHAT = "the checkpoint"
"""Name of the files in messages."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal digits."""


class WrittenFile(BaseModel):
    """Name, size and hash of a written file; manifests of version 1 lack the size."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: Annotated[str, Field(max_length=200)]
    bytes: int | None = Field(default=None, ge=0, lt=2**63)
    sha256: Digest


@dataclass(frozen=True)
class FileEntry:
    """A tensor's entry in a file; `held_as` is our name."""

    name: str
    held_as: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(entries: Iterable[FileEntry]) -> list[FileEntry]:
    """Return the tensors of a file, wide dtypes first, so that each is aligned to its element size."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def entries_of(state: Mapping[str, Tensor]) -> list[FileEntry]:
    """Return the entries of tensors in file order; raises `UsageError` for a dtype that safetensors does not have."""
    entries = [FileEntry(name, name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(state.items())]
    for entry in entries:
        name_of(entry.dtype, entry.name)
    return in_file_order(entries)


def header_of(entries: Sequence[FileEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file, with its length before it.

    Raises `UsageError` for a tensor of a dtype that safetensors does not have.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        dtype, place = name_of(entry.dtype, entry.name), [start, start + entry.nbytes]
        header[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": place}
        start = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: Path, entries: Sequence[FileEntry], parts: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a new file, and return its entry for a manifest once it is on disk. Raises `OSError`.

    `parts` are the numbers of the tensors, one after the other, on whatever device, in parts of any size.
    """
    digest, num_bytes = hashlib.sha256(), 0
    header = header_of(entries, metadata or {})
    opened = os.open(path, _FLAGS, 0o666)
    try:
        for block in chain([memoryview(header)], (block for part in parts for block in _blocks(part))):
            digest.update(block)
            num_bytes += len(block)
            left = block
            while left:
                left = left[os.write(opened, left) :]
        os.fsync(opened)
    except BaseException:
        path.unlink(missing_ok=True)  # frees the space where the disk is full
        raise
    finally:
        os.close(opened)
    return WrittenFile(name=path.name, bytes=num_bytes, sha256=digest.hexdigest())


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor by parts of `BYTES_AT_ONCE` on the host."""
    for part in tensor.detach().reshape(-1).split(max(BYTES_AT_ONCE // tensor.dtype.itemsize, 1)):
        if part.numel():
            yield part.cpu().contiguous().view(torch.uint8).numpy().data


def hash_file(path: Path) -> WrittenFile:
    """Return the name, the size and the SHA-256 of a file; raises `InputError`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BYTES_AT_ONCE))
    with open_plain(path, WHAT) as (opened, size):
        for start in range(0, size, BYTES_AT_ONCE):
            part = block[: min(size - start, BYTES_AT_ONCE)]
            fill(opened, part, path)
            digest.update(part)
    return WrittenFile(name=path.name, bytes=size, sha256=digest.hexdigest())


def require_intact(path: Path, file: WrittenFile) -> None:
    """Raise `InputError` with the path unless a file matches its manifest entry: the size is checked first."""
    with open_plain(path, WHAT) as (_, size):
        if file.bytes is not None and size != file.bytes:
            raise InputError(
                f"{path}: the file is damaged: it has {counted(size, 'byte')}, not the {file.bytes} of the manifest"
            )
    if hash_file(path).sha256 != file.sha256:
        raise InputError(f"{path}: the file is damaged: its SHA-256 is not that of the manifest")
