"""A folder of safetensors, as transformers writes it: which tensors there are, each in the file that has it.

    model.safetensors                       one file, or
    model.safetensors.index.json            which tensor lies in which of several files beside it
    config.json                             what the model says of itself

Nothing in a folder is ever resolved to code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, parse_strict

from ..stored_tensors import MappedFile, StoredTensor

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
CONFIG = "config.json"
MOST_BYTES = 2**26
"""The longest index, and description of a model, that is read."""


@dataclass(frozen=True)
class Folder:
    """The tensors of a checkpoint, by name, and its `config.json`, empty where there is none."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]


def open_folder(path: Path) -> Folder:
    """Return a checkpoint: a file, an index, or the folder of either; files are opened when they are first read.

    Raises `UsageError` where there is none, `InputError` for files that are damaged.
    """
    if path.is_dir():
        path = path / (ONE_FILE if (path / ONE_FILE).exists() else INDEX)
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
    """Return the tensors of files that all lie beside their index."""
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
        return parse_strict(read_whole(path, MOST_BYTES, "it"))
    except UsageError as error:
        raise InputError(str(error)) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
