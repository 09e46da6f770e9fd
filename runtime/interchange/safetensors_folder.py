"""A folder of safetensors as it is read: which tensors there are, and any piece of each without the rest of it.

    model.safetensors                       one file, or
    model.safetensors.index.json            which tensor lies in which of several files beside it
    config.json                             what the model says of itself

Nothing in a folder is ever resolved to code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, parse_strict

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
CONFIG = "config.json"
MOST_BYTES = 2**26
"""The longest index, and description of a model, that is read."""
Places = tuple[slice, ...]


class Lying(Protocol):
    """A tensor that lies in files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places, of its dimensions."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of one file."""

    name: str
    path: Path
    open_file: Callable[[Path], Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        return tuple(self._slice().get_shape())

    def read(self, places: Places) -> Tensor:
        """Return the numbers at these places; no others are read."""
        if not places:
            whole: Tensor = self.open_file(self.path).get_tensor(self.name)
            return whole
        found: Tensor = self._slice()[places]
        return found

    def _slice(self) -> Any:
        try:
            return self.open_file(self.path).get_slice(self.name)
        except SafetensorError as error:
            raise InputError(f"{self.path}: it has no tensor {self.name!r}, although the index says so") from error


@dataclass(frozen=True)
class Joined:
    """Tensors that are one in the model: joined along `dim`, or stacked along a new one."""

    parts: tuple[Lying, ...]
    dim: int
    stacks: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape."""
        first = list(self.parts[0].shape)
        if self.stacks:
            return (*first[: self.dim], len(self.parts), *first[self.dim :])
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

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
class Folder:
    """The tensors of a checkpoint, by name, and its `config.json`, empty where there is none."""

    path: Path
    tensors: Mapping[str, Lying]
    config: Mapping[str, Any]


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """Open a checkpoint: a file, an index, or the folder of either; files are opened when they are first read.

    Raises `UsageError` where there is none, `InputError` for files that are damaged.
    """
    if path.is_dir():
        path = path / (ONE_FILE if (path / ONE_FILE).exists() else INDEX)
        path = path if path.exists() else path.with_name(ONE_FILE)
    if not path.exists():
        raise UsageError(f"{path}: no such file; a checkpoint is a safetensors file, or a directory with {ONE_FILE}")
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def open_file(path: Path) -> Any:
            if path not in files:
                if path.exists() and not path.is_file():  # such as a FIFO, which would be waited for
                    raise InputError(f"{path}: it is not a plain file")
                try:
                    files[path] = stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise InputError(f"{path}: not a safetensors file: {error}") from error
            return files[path]

        homes = _read_index(path) if path.suffix == ".json" else dict.fromkeys(open_file(path).keys(), path)
        tensors = {name: FileTensor(name, home, open_file) for name, home in homes.items()}
        yield Folder(path, tensors, _read_config(path.parent / CONFIG))


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, Path]:
    """Return in which file each tensor lies; all of them lie beside the index."""
    try:
        names = _Index.model_validate(_read_json(path)).weight_map
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from None
    for name in names.values():
        if Path(name).name != name:
            raise InputError(f"{path}: {name!r} is not the name of a file beside it")
    return {tensor: path.parent / name for tensor, name in names.items()}


def _read_config(path: Path) -> dict[str, Any]:
    """Return what a model says of itself, or nothing where it says nothing."""
    if not path.exists():
        return {}
    config = _read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path}: it must hold an object")
    return config


def _read_json(path: Path) -> object:
    try:
        return parse_strict(read_whole(path, MOST_BYTES, "it"))
    except UsageError as error:
        raise InputError(str(error)) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def shape_fault(found: Sequence[int], wanted: Sequence[int], *, cut_short: bool) -> str | None:
    """Say where a shape differs from the wanted one, of which the first axis may be a part where it is `cut_short`."""
    if len(found) != len(wanted):
        return "it has other axes"
    for axis, (has, wants) in enumerate(zip(found, wanted, strict=True)):
        if has != wants and not (cut_short and axis == 0 and has > wants):
            return f"axis {axis} differs"
    return None
