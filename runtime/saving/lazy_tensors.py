"""Lazily read tensors, of which any slice is read without the rest.

    of_memory         in this process
    MappedFile        in a safetensors file, which is mapped anew now and then: little of it stays resident
    joined, part_of   several that are one in the model, or one that is several
    turned            transposed
    alike             under several names, which must hold equal numbers

Also a folder of safetensors as transformers writes it: its tensors, each in one of its files.

    model.safetensors                       one file, or
    model.safetensors.index.json            names the file of each tensor, several beside it
    config.json                             the model's configuration

No content of a file is ever resolved to code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, parse_strict

from ..blocks.dtype_names import type_of

MOST_MAPPED = 2**25
"""Bytes of a file that are read before it is mapped anew: pages that were read would stay resident."""

Places = tuple[slice, ...]
Outline = tuple[tuple[int, ...], torch.dtype]
"""A shape, and a dtype."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read by slices.

    Attributes:
        find_outline: returns its full shape and its dtype, when first needed.
        read: returns the numbers at a slice for each dimension.
        memory: the tensor itself, if it is one of this process.
        is_turned: whether it is stored transposed.
    """

    find_outline: Callable[[], Outline]
    read: Callable[[Places], Tensor]
    memory: Tensor | None = None
    is_turned: bool = False

    @cached_property
    def _outline(self) -> Outline:
        return self.find_outline()

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape."""
        return self._outline[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype; raises `InputError` for one that cannot be read."""
        return self._outline[1]


def of_memory(tensor: Tensor) -> StoredTensor:
    """Return a tensor of this process as a stored one."""
    memory = tensor.detach()
    return StoredTensor(lambda: (tuple(memory.shape), memory.dtype), memory.__getitem__, memory)


class MappedFile:
    """A safetensors file, opened on first use; raises `InputError` then for a file of another kind."""

    def __init__(self, path: Path) -> None:
        self.path, self._num_read = path, 0
        self._opened: Any = None

    @property
    def opened(self) -> Any:
        """The file as `safe_open` returns it."""
        if self._opened is None:
            if self.path.exists() and not self.path.is_file():  # a FIFO, for one, would block
                raise InputError(f"{self.path}: it is not a plain file")
            try:
                self._opened = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{self.path}: not a safetensors file: {error}") from error
        return self._opened

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors of the file, by name."""
        return {name: self.tensor(name) for name in self.opened.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor of the file; an unsupported dtype raises only when it is asked for."""

        def outline() -> tuple[tuple[int, ...], torch.dtype]:
            found = self._slice_of(name)
            return tuple(found.get_shape()), type_of(found.get_dtype(), f"{self.path}: {name!r}")

        return StoredTensor(outline, lambda places: self._read_places(name, places))

    def _slice_of(self, name: str) -> Any:
        try:
            return self.opened.get_slice(name)
        except SafetensorError as error:
            raise InputError(f"{self.path}: it has no tensor {name!r}, although the index says so") from error

    def _read_places(self, name: str, places: Places) -> Tensor:
        """Return numbers of a tensor as a copy: a view would keep all of the file mapped."""
        found: Tensor = self._slice_of(name)[places] if places else self.opened.get_tensor(name).clone()
        self._num_read += found.nbytes
        if self._num_read > MOST_MAPPED:
            self._opened, self._num_read = None, 0
        return found


def joined(parts: Sequence[StoredTensor], dim: int, *, stacks: bool = False) -> StoredTensor:
    """Return tensors joined along `dim`, or stacked along a new one; only parts that a slice needs are read."""

    def outline() -> Outline:
        first = parts[0].shape
        size = len(parts) if stacks else sum(part.shape[dim] for part in parts)
        return (*first[:dim], size, *first[dim if stacks else dim + 1 :]), parts[0].dtype

    def read(places: Places) -> Tensor:
        place, before, behind = places[dim], places[:dim], places[dim + 1 :]
        if stacks:
            return torch.stack([part.read((*before, *behind)) for part in parts[place]], dim)
        found, start = [], 0
        for part in parts:
            size = part.shape[dim]
            low, high = max(place.start - start, 0), min(place.stop - start, size)
            if low < high:
                found.append(part.read((*before, slice(low, high), *behind)))
            start += size
        return torch.cat(found, dim)

    return StoredTensor(outline, read)


def part_of(whole: StoredTensor, dim: int, index: int, count: int) -> StoredTensor:
    """Return one of several equal pieces of a tensor along `dim`."""

    def outline() -> Outline:
        return (*whole.shape[:dim], whole.shape[dim] // count, *whole.shape[dim + 1 :]), whole.dtype

    def read(places: Places) -> Tensor:
        first = index * (whole.shape[dim] // count)
        moved = slice(first + places[dim].start, first + places[dim].stop)
        return whole.read((*places[:dim], moved, *places[dim + 1 :]))

    return StoredTensor(outline, read)


def turned(stored: StoredTensor) -> StoredTensor:
    """Return a matrix transposed."""
    return StoredTensor(
        lambda: (stored.shape[::-1], stored.dtype), lambda places: stored.read(places[::-1]).t(), is_turned=True
    )


def alike(named: Mapping[str, StoredTensor], where: Path) -> StoredTensor:
    """Return a tensor that is stored under several names; reading raises `MisfitError` where its numbers differ."""
    (first, stored), *others = named.items()

    def read(places: Places) -> Tensor:
        found = stored.read(places)
        for name, other in others:
            if other.shape != stored.shape or not torch.equal(found, other.read(places)):
                both = " and ".join(sorted(map(repr, (first, name))))
                raise MisfitError(f"{where}: {both} differ, but the model ties them; build it untied")
        return found

    return StoredTensor(lambda: (stored.shape, stored.dtype), read)


SAFETENSORS_INDEX_FILE = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
CONFIG = "config.json"
MOST_JSON_BYTES = 2**26
"""Longest index, and configuration, that is read, in bytes."""


@dataclass(frozen=True)
class Folder:
    """Tensors of a checkpoint, by name, and its `config.json`, empty where there is none."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]


def open_folder(path: Path) -> Folder:
    """Return a checkpoint from a file, an index, or the folder of either; files are opened when they are first read.

    Raises `UsageError` where there is none, `InputError` for files that are damaged.
    """
    if path.is_dir():
        path = path / (ONE_FILE if (path / ONE_FILE).exists() else SAFETENSORS_INDEX_FILE)
        path = path if path.exists() else path.with_name(ONE_FILE)
    if not path.exists():
        raise UsageError(f"{path}: no such file; a checkpoint is a safetensors file, or a directory with {ONE_FILE}")
    tensors = _read_index(path) if path.suffix == ".json" else MappedFile(path).tensors()
    config = _read_json(path.parent / CONFIG) if (path.parent / CONFIG).exists() else {}
    if not isinstance(config, dict):
        raise InputError(f"{path.parent / CONFIG}: it must hold an object")
    return Folder(path, tensors, config)


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an index, whose files are all beside it."""
    try:
        homes = _Index.model_validate(_read_json(path)).weight_map
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from None
    files = {name: MappedFile(path.parent / name) for name in homes.values()}
    for name in files:
        if Path(name).name != name:
            raise InputError(f"{path}: {name!r} is not the name of a file beside it")
    return {tensor: files[home].tensor(tensor) for tensor, home in homes.items()}


def _read_json(path: Path) -> object:
    try:
        return parse_strict(read_whole(path, MOST_JSON_BYTES, "it"))
    except UsageError as error:
        raise InputError(str(error)) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
