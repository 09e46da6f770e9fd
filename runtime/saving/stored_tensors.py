"""Tensors that lie somewhere, of which any piece is read without the rest.

    MemoryTensor    in this process
    FileTensor      in a file of safetensors, which is mapped anew now and then: little of it stays resident
    Joined, Part    several that are one in the model, or one that is several
    Turned          transposed
    Alike           under several names, which have to have the same numbers

Nothing in a file is ever resolved to code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quintsched.errors import InputError, MisfitError

from ..blocks.number_types import type_of

MOST_MAPPED = 2**25
"""How many bytes of a file are read before it is mapped anew: what was read would stay resident."""

Places = tuple[slice, ...]


class StoredTensor(Protocol):
    """A tensor that is read by pieces."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places, one for each dimension."""


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor of this process."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.tensor.dtype

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places."""
        return self.tensor.detach()[places]


class MappedFile:
    """A safetensors file, which is opened when something of it is read; raises `InputError` then for what is none."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0
        self._opened: Any = None

    @property
    def opened(self) -> Any:
        """The file, as `safe_open` gives it."""
        if self._opened is None:
            if self.path.exists() and not self.path.is_file():  # such as a FIFO, which would be waited for
                raise InputError(f"{self.path}: it is not a plain file")
            try:
                self._opened = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{self.path}: not a safetensors file: {error}") from error
        return self._opened

    def tensors(self) -> dict[str, FileTensor]:
        """Return the tensors of the file, by name."""
        return {name: FileTensor(name, self) for name in self.opened.keys()}  # noqa: SIM118

    def slice_of(self, name: str) -> Any:
        """Return what reads places of a tensor."""
        try:
            return self.opened.get_slice(name)
        except SafetensorError as error:
            raise InputError(f"{self.path}: it has no tensor {name!r}, although the index says so") from error

    def read(self, name: str, places: Places) -> Tensor:
        """Return numbers of a tensor as a copy: a view would keep all of the file mapped."""
        found: Tensor = self.slice_of(name)[places] if places else self.opened.get_tensor(name).clone()
        self._read += found.nbytes
        if self._read > MOST_MAPPED:
            self._opened, self._read = None, 0
        return found


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    name: str
    file: MappedFile

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        return tuple(self.file.slice_of(self.name).get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers; raises `InputError` for one that cannot be read."""
        return type_of(self.file.slice_of(self.name).get_dtype(), f"{self.file.path}: {self.name!r}")

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places; no others are read."""
        return self.file.read(self.name, places)


@dataclass(frozen=True)
class Joined:
    """Tensors that are one in the model: joined along `dim`, or stacked along a new one."""

    parts: tuple[StoredTensor, ...]
    dim: int
    stacks: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        first = list(self.parts[0].shape)
        if self.stacks:
            return (*first[: self.dim], len(self.parts), *first[self.dim :])
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.parts[0].dtype

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places, of no more parts than have some."""
        dim, place = self.dim, places[self.dim]
        if self.stacks:
            rest = (*places[:dim], *places[dim + 1 :])
            return torch.stack([part.read(rest) for part in self.parts[place]], dim)
        found, start = [], 0
        for part in self.parts:
            size = part.shape[dim]
            low, high = max(place.start - start, 0), min(place.stop - start, size)
            if low < high:
                found.append(part.read((*places[:dim], slice(low, high), *places[dim + 1 :])))
            start += size
        return torch.cat(found, dim)


@dataclass(frozen=True)
class Part:
    """One of several equal pieces of a tensor along `dim`."""

    whole: StoredTensor
    dim: int
    index: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        full = self.whole.shape
        return (*full[: self.dim], full[self.dim] // self.count, *full[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.whole.dtype

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places."""
        start, place = self.index * self.shape[self.dim], places[self.dim]
        moved = slice(start + place.start, start + place.stop)
        return self.whole.read((*places[: self.dim], moved, *places[self.dim + 1 :]))


@dataclass(frozen=True)
class Turned:
    """A matrix that is transposed in the model."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the model."""
        return self.stored.shape[::-1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.stored.dtype

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places."""
        return self.stored.read(places[::-1]).t()


@dataclass(frozen=True)
class Alike:
    """A tensor that is stored under several names; reading raises `MisfitError` where its numbers differ."""

    named: Mapping[str, StoredTensor]
    where: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        return next(iter(self.named.values())).shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return next(iter(self.named.values())).dtype

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places."""
        (first, stored), *others = self.named.items()
        found = stored.read(places)
        for name, other in others:
            if other.shape != stored.shape or not torch.equal(found, other.read(places)):
                both = " and ".join(sorted(map(repr, (first, name))))
                raise MisfitError(f"{self.where}: {both} differ, but the model ties them; build it untied")
        return found
