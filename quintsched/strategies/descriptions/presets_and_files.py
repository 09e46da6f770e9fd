"""Lookup of models and hardware: by name of a preset, from a file, or from a mapping.

    "gpt3-175b", "GPT3_175B"       ─┐
    "my_model.yaml", "m.json"      ─┤
    "config.json", its folder      ─┼──▶ Model            "a100-80gb", "cluster.yaml", {...} ──▶ Hardware
    {"like": "gpt3-175b", …}       ─┘

Names of presets are compared without case and punctuation. A mapping, or a file, may name another one by `like`, and
give only the differences. `attention: unfused` is for runs that materialise scores, as Megatron-LM's did until 2022;
the default is fused. `cpu` is this machine, as measured by `quintsched calibrate`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from quintsched.errors import InputError, UsageError, quoted, suggest
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, shorten
from quintsched.files.strictyaml import parse_yaml
from quintsched.files.user_records import read_json
from quintsched.strategies.descriptions import model_figures_of_other_tools
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.huggingface import read_config
from quintsched.strategies.descriptions.model import Description, Model
from quintsched.strategies.descriptions.simumax import read_system

PRESETS = Path(__file__).parent / "presets"

MOST_DESCRIPTION_BYTES = 2**20
"""Maximum number of bytes of a description."""

SUFFIXES = (".yaml", ".yml", ".json")

D = TypeVar("D", bound=Description)
DescriptionSource = str | Path | Mapping[str, Any]


def find_model(what: DescriptionSource | Model) -> Model:
    """Return the model of a preset's name, a file (also transformers' `config.json`, or its folder) or a mapping.

    Raises `UsageError` for an unknown name, `InputError` with the place for a broken description.
    """
    if isinstance(what, Model):
        return what
    if isinstance(what, Mapping):
        return _model(what, "the model")
    _require_name(what, "model")
    name, presets = plain(str(what)), dict[str, Model](_presets("models", Model))
    if name in presets:
        return presets[name]
    path = _file(what, "config.json", "model", model_names())
    return _model(_read(path, "the model"), str(path))


def find_hardware(what: DescriptionSource | Hardware) -> Hardware:
    """Return the hardware of a preset's name, a file or a mapping; raises as `find_model` does."""
    if isinstance(what, Hardware):
        return what
    if isinstance(what, Mapping):
        return _hardware_of(what, "the hardware")
    _require_name(what, "hardware")
    name, presets = plain(str(what)), dict[str, Hardware](_presets("hardware", Hardware))
    if name in presets:
        return presets[name]
    path = _calibrated() if name == "cpu" else _file(what, "hardware.yaml", "hardware", [*hardware_names(), "cpu"])
    return _hardware_of(_read(path, "the hardware"), str(path))


def _hardware_of(values: Mapping[str, Any], source: str) -> Hardware:
    if {"sys_name", "accelerator"} <= values.keys():  # of SimuMax
        try:
            values = read_system(values)
        except (KeyError, TypeError) as error:
            raise InputError(f"{source}: a system file of SimuMax without {error}") from None
    return _checked(Hardware, model_figures_of_other_tools.of_hardware(values), source, find_hardware)


def model_names() -> list[str]:
    """Return the names of the models in the package."""
    return list(dict.fromkeys(model.name for model in _presets("models", Model).values()))


def hardware_names() -> list[str]:
    """Return the names of the hardware in the package; `cpu` is another one, once calibrated."""
    return list(dict.fromkeys(hardware.name for hardware in _presets("hardware", Hardware).values()))


def plain(name: str) -> str:
    """Return a name without case and punctuation; separators and points between digits stay: 1.3b is not 13b."""
    return re.sub(r"(?<=\d)-(?!\d)|(?<!\d)-", "", re.sub(r"[^a-z0-9.]+", "-", name.lower()))


def _require_name(what: object, kind: str) -> None:
    if not isinstance(what, str | Path):
        raise UsageError(f"{kind}: give a preset's name, a file or a mapping of its sizes, not {shorten(repr(what))}")


def _model(values: Mapping[str, Any], source: str) -> Model:
    if "model_type" in values:  # of transformers
        try:
            values = read_config(values)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
    else:
        values = model_figures_of_other_tools.of_model(values)
    return _checked(Model, values, source, find_model)


def _checked(kind: type[D], values: Mapping[str, Any], source: str, find: Callable[[DescriptionSource], D]) -> D:
    """Return the validated record; fields that are left out come from the one it is `like`."""
    given = dict(values)
    if "like" in given:
        like = given.pop("like")
        if not isinstance(like, str):
            raise InputError(f"{source}: /like: give the name of a preset, or of a file")
        given = find(like).model_dump() | given
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InputError(f"{source}: {describe_faults(error, kind.model_fields)}") from None


def _file(what: str | Path, within: str, kind: str, names: list[str]) -> Path:
    """Return the file of a path, or the file `within` a folder; raises `UsageError` for anything but a path."""
    path = Path(os.path.expanduser(what))
    is_path = isinstance(what, Path) or what.startswith(("/", "./", "../", "~")) or path.suffix in SUFFIXES
    if os.path.isdir(path):
        return path / within
    if is_path or os.path.isfile(path):
        return path
    raise UsageError(
        f"unknown {kind} {quoted(what)}{suggest(str(what).lower(), names)}; or give a file ({', '.join(SUFFIXES)})"
    )


def calibrated_file() -> Path:
    """Return the file in which `quintsched calibrate` stores the rates of this machine.

    It is in `$XDG_CACHE_HOME`, or else in `~/.cache`; a relative path there is ignored, as that convention demands.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "quintsched", "cpu.json")


def _calibrated() -> Path:
    path = calibrated_file()
    if not path.is_file():
        raise UsageError(
            f"hardware cpu: this machine has not been measured ({path} is missing); run: quintsched calibrate"
        )
    return path


def _read(path: Path, what: str) -> Mapping[str, Any]:
    if path.suffix == ".json":
        found = read_json(path, MOST_DESCRIPTION_BYTES, what)
    else:
        found = parse_yaml(read_whole(path, MOST_DESCRIPTION_BYTES, what), str(path))
    if not isinstance(found, Mapping):
        raise InputError(f"{path}: /: {what} is described by names and sizes, not by a {type(found).__name__}")
    return found


@cache
def _presets(folder: str, kind: type[D]) -> dict[str, D]:
    """Return the presets of a folder by their plain names and aliases."""
    found: dict[str, D] = {}
    for path in sorted((PRESETS / folder).glob("*.yaml")):
        content = parse_yaml(path.read_bytes(), path.name)
        for name, own in content[folder].items():
            values = {"name": name} | content.get("common", {}) | own
            names = [name, *values.pop("aliases", ())]
            found.update(dict.fromkeys(map(plain, names), kind.model_validate(values)))
    return found
