"""A rank's file, in the format of safetensors: a header that says what lies where, then one block of memory.

    length of the header (8 bytes) │ {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …} │ memory

A save in the background writes a flat buffer of the host's, into which tensors were copied; one that is waited for
writes the tensors as they are. A load reads all once, to verify it, and then maps each tensor as it is asked for: so
nothing of a file stays resident.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from quintsched.errors import InputError
from quintsched.files.plain import fill, open_plain
from quintsched.files.strictjson import parse_strict, pointer, shorten

from ..blocks.number_types import TYPES, name_of
from ..saving.write_tensors import WrittenFile
from .manifest import WHAT

BLOCK = 2**24
"""Bytes that are read, written and hashed at a time."""

MOST_HEADER = 10**8
"""The longest header that is read, in bytes: the limit of safetensors."""

MOST_NAME, MOST_AXES = 4096, 64

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor in a flat buffer of bytes, or a copy where it does not lie as its type has to."""
        found = memory[self.start : self.stop]
        if self.start % self.dtype.itemsize:
            found = found.clone()
        return found.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a file lie; `num_bytes` is all of their memory, `metadata` what the file says besides."""

    slots: tuple[Slot, ...]
    num_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
        """Return a layout for these tensors: wide types first, so that each lies as its type has to.

        Raises `UsageError` for a tensor of a type that safetensors does not have.
        """
        slots, start = [], 0
        for name, tensor in sorted(state.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            name_of(tensor.dtype, name)
            stop = start + tensor.numel() * tensor.dtype.itemsize
            slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, stop))
            start = stop
        return cls(tuple(slots), start, metadata)

    @classmethod
    def parse(cls, header: bytes, num_bytes: int) -> Layout:
        """Return what a header says of that many bytes; raises `InputError` unless it describes them all, once."""
        found = parse_strict(header)
        if not isinstance(found, dict):
            raise InputError("the header is not an object")
        metadata = found.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise InputError(f"/{METADATA}: has to have texts")
        slots = [_read_slot(name, entry) for name, entry in found.items()]
        slots.sort(key=lambda slot: (slot.start, slot.stop))
        start = 0
        for slot in slots:
            if slot.start != start:
                raise InputError(f"{pointer(shorten(slot.name))}: begins at byte {slot.start}, not at {start}")
            start = slot.stop
        if start != num_bytes:
            raise InputError(f"the header describes {start} bytes, but {num_bytes} follow")
        return cls(tuple(slots), num_bytes, metadata)

    def header(self) -> bytes:
        """Return what stands before the memory, its length included."""
        entries: dict[str, object] = {METADATA: dict(self.metadata)} if self.metadata else {}
        entries |= {
            slot.name: {
                "dtype": name_of(slot.dtype, slot.name),
                "shape": list(slot.shape),
                "data_offsets": [slot.start, slot.stop],
            }
            for slot in self.slots
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors that lie in a flat buffer of `num_bytes` bytes, by name."""
        return {slot.name: slot.view(memory) for slot in self.slots}


def _read_slot(name: str, entry: object) -> Slot:
    if len(name) > MOST_NAME:
        raise InputError(f"{shorten(name)!r} is longer than the {MOST_NAME} characters that a name may have")
    place = pointer(shorten(name))
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise InputError(f"{place}: has to have {', '.join(sorted(_KEYS))} and no other keys")
    letters, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = TYPES.get(letters) if isinstance(letters, str) else None
    if dtype is None:
        raise InputError(f"{place}/dtype: there is no {shorten(str(letters))!r}")
    if not _are_sizes(shape) or len(shape) > MOST_AXES:
        raise InputError(f"{place}/shape: is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise InputError(f"{place}/data_offsets: are not two numbers of bytes")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{place}: has {offsets[1] - offsets[0]} bytes, which are not those of its shape and type")
    return Slot(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def blocks_of(memory: Tensor) -> Iterator[memoryview]:
    """Yield a flat buffer of bytes in parts of `BLOCK`."""
    view = memory.numpy().data
    for start in range(0, len(view), BLOCK):
        yield view[start : start + BLOCK]


def blocks_of_state(layout: Layout, state: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the same bytes of tensors that lie where they are, on whatever device, by parts of `BLOCK` on the host."""
    for slot in layout.slots:
        for part in state[slot.name].detach().reshape(-1).split(BLOCK // slot.dtype.itemsize):
            yield from blocks_of(part.cpu().view(torch.uint8)) if part.numel() else ()


class MappedTensors(Mapping[str, Tensor]):
    """The tensors of a file, each mapped into memory by itself when it is asked for, until nobody has it any more.

    Who changes one changes a copy.
    """

    def __init__(self, path: Path, layout: Layout, first: int) -> None:
        self._path, self._num_bytes = path, first + layout.num_bytes
        self._slots = {
            slot.name: replace(slot, start=first + slot.start, stop=first + slot.stop) for slot in layout.slots
        }

    def __getitem__(self, name: str) -> Tensor:
        slot = self._slots[name]
        memory = torch.from_file(str(self._path), shared=False, size=self._num_bytes, dtype=torch.uint8)
        return slot.view(memory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def pop(self, name: str) -> Tensor | None:
        """Take a tensor out, and return it; None where there is none."""
        found = self.get(name)
        self._slots.pop(name, None)
        return found


def read_shard(path: Path, file: WrittenFile) -> tuple[MappedTensors, Mapping[str, str]]:
    """Return the tensors of a file, which is what the manifest says of it, and its metadata.

    Its size is looked at before anything is read, its header before the rest. Raises `InputError` with the path.
    """
    digest = hashlib.sha256()

    def read(count: int) -> bytes:
        content = bytearray(count)
        fill(opened, memoryview(content), path)
        digest.update(content)
        return bytes(content)

    with open_plain(path, WHAT) as (opened, size):
        _require_size(path, file, size)
        length = int.from_bytes(read(8), "little")
        if length > min(MOST_HEADER, size - 8):
            raise InputError(f"{path}: the file is damaged: its header of {length} bytes is too long")
        try:
            layout = Layout.parse(read(length), size - 8 - length)
        except InputError as error:
            raise InputError(f"{path}: the file is damaged: {error}") from None
        _hash_rest(digest, opened, path, layout.num_bytes)
    _require_digest(path, file, digest.hexdigest())
    return MappedTensors(path, layout, 8 + length), layout.metadata


def write_shard(path: Path, layout: Layout, blocks: Iterable[memoryview]) -> WrittenFile:
    """Write a new file, and return what the manifest says of it, when it is on the disk. Raises `OSError`."""
    digest = hashlib.sha256()
    opened = os.open(path, _FLAGS, 0o666)
    try:
        for block in chain([memoryview(layout.header())], blocks):
            digest.update(block)
            left = block
            while left:
                left = left[os.write(opened, left) :]
        os.fsync(opened)
    except BaseException:
        path.unlink(missing_ok=True)  # a disk that is full has room again
        raise
    finally:
        os.close(opened)
    return WrittenFile(name=path.name, bytes=len(layout.header()) + layout.num_bytes, sha256=digest.hexdigest())


def hash_file(path: Path) -> WrittenFile:
    """Return the name, the size and the SHA-256 of a file; raises `InputError`."""
    digest = hashlib.sha256()
    with open_plain(path, WHAT) as (opened, size):
        _hash_rest(digest, opened, path, size)
    return WrittenFile(name=path.name, bytes=size, sha256=digest.hexdigest())


def _hash_rest(digest: hashlib._Hash, opened: BinaryIO, path: Path, num_bytes: int) -> None:
    """Read so many bytes of an open file into a digest."""
    block = bytearray(min(BLOCK, num_bytes))
    for start in range(0, num_bytes, BLOCK):
        part = memoryview(block)[: min(num_bytes - start, BLOCK)]
        fill(opened, part, path)
        digest.update(part)


def require_intact(path: Path, file: WrittenFile) -> None:
    """Raise `InputError` with the path unless a file is what the manifest says of it."""
    with open_plain(path, WHAT) as (_, size):
        _require_size(path, file, size)
    _require_digest(path, file, hash_file(path).sha256)


def _require_size(path: Path, file: WrittenFile, size: int) -> None:
    if file.bytes is not None and size != file.bytes:
        raise InputError(f"{path}: the file is damaged: it has {size} bytes, not the {file.bytes} of the manifest")


def _require_digest(path: Path, file: WrittenFile, digest: str) -> None:
    if digest != file.sha256:
        raise InputError(f"{path}: the file is damaged: its SHA-256 is not that of the manifest")
