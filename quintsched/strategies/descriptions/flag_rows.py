"""Row of flags: model, hardware and strategy as a command line or a table gives them.

    {"model": "gpt3-175b", "hardware": "a100-80gb", "gpus": 64, "tp": 8, "pp": 8, "batch": 64}
                                │
                                ▼
    Row(model, hardware, Strategy(gpus=64, dp=1, tp=8, pp=8, batch=64, seq=2048))

Missing or null values are derived from the rest: dp from the GPUs and the other axes, GPUs as the product of the axes,
the sequence as the model's longest. Model and hardware may also be descriptions themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quintsched.errors import UsageError, quoted, suggest
from quintsched.ir.mesh import whole_number
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.descriptions.strategy import MODULES, Strategy, modules_of

INNERMOST_FIRST = ("tp", "cp", "ep", "dp", "pp")
"""Axes from the innermost, whose ranks are nearest neighbours."""

KEYS = ("model", "hardware", "gpus_per_node", *Strategy.model_fields)
"""Keys of a row."""

LARGEST_SIZE = 2**40
"""Largest size."""


@dataclass(frozen=True)
class PredictionRow:
    """Input of one prediction."""

    model: Model
    hardware: Hardware
    strategy: Strategy


def read_row(values: Mapping[str, Any]) -> PredictionRow:
    """Return a row with its missing values filled in.

    Raises UsageError for an unknown key or an invalid value; InputError for a broken description.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in KEYS:
            raise UsageError(f"unknown key {quoted(name)}{suggest(name, KEYS)}")
    model, hardware = find_parts(given)
    return PredictionRow(model, hardware, read_strategy(model, given))


def find_parts(given: Mapping[str, Any]) -> tuple[Model, Hardware]:
    """Return the model and the hardware of a row; raises UsageError if one is missing."""
    for name in ("model", "hardware"):
        if given.get(name) is None:
            raise UsageError(f"{name} is missing; name a preset or a file")
        if not isinstance(given[name], str | Path | Mapping | Model | Hardware):
            raise UsageError(f"{name} is {quoted(given[name])}; name a preset or a file, or give a description")
    hardware = find_hardware(given["hardware"])
    if given.get("gpus_per_node") is not None:
        size = _size("gpus_per_node", given["gpus_per_node"])
        hardware = hardware.model_copy(update={"gpus_per_node": size})
    return find_model(given["model"]), hardware


def longest_sequence(model: Model) -> int:
    """Return the default number of tokens per sample: the model's longest sequence, or the patches of an image."""
    return model.images.tokens if model.images else model.seq


def read_strategy(model: Model, given: Mapping[str, Any]) -> Strategy:
    """Return the strategy of a row; raises UsageError."""
    if given.get("batch") is None:
        raise UsageError("batch is missing; give the samples of a step, over all replicas")
    fields = {name: given[name] for name in Strategy.model_fields if name in given}
    fields |= {name: read(name, fields[name]) for name, read in _READ.items() if name in fields}
    try:
        return Strategy.model_validate({"seq": longest_sequence(model)} | fields | _mesh(given))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:1]))
        raise UsageError(f"{place} is {quoted(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _mesh(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the axes and the GPUs, with missing ones derived from the rest."""
    sizes = {name: _size(name, given[name]) for name in ("gpus", *INNERMOST_FIRST) if name in given}
    found = {name: sizes.get(name, 1) for name in INNERMOST_FIRST}
    product = math.prod(found.values())
    gpus = sizes.get("gpus", product)
    if "dp" not in sizes:
        if gpus % product:
            raise UsageError(f"gpus={gpus} cannot be shared out: {_product(found)} does not divide it")
        found["dp"] = gpus // product
    elif gpus != product:
        raise UsageError(f"gpus={gpus}, but {_product(found)}")
    return {"gpus": gpus, **found}


def _product(sizes: Mapping[str, int]) -> str:
    """Return the axes as text, with their product if there are several."""
    large = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return " x ".join(large) + (f" = {math.prod(sizes.values())}" if len(large) > 1 else "") or "one rank"


def _size(name: str, value: object) -> int:
    size = whole_number(value)
    if size is None or not 1 <= size <= LARGEST_SIZE:
        raise UsageError(f"{name} is {quoted(value)}; give a whole number from 1 to {LARGEST_SIZE}")
    return size


def read_recompute(name: str, value: object) -> object:
    """Return the recompute setting: a word, a number of layers, or one number per stage; also from text ("1,2")."""
    if value in ("none", "selective", "full") or modules_of(value):
        return value
    found = _numbers(value)
    if found is None:
        raise UsageError(
            f"{name} is {quoted(value)}; give none, selective, full, modules ({'+'.join(MODULES)}), a number of "
            "layers, or one for each stage"
        )
    return found


def _read_stages(name: str, value: object) -> object:
    found = _numbers(value)
    if isinstance(value, str) and isinstance(found, int):
        return (found,)
    if not isinstance(found, tuple):
        raise UsageError(f"{name} is {quoted(value)}; give the layers of each stage: 3,4,4,3")
    return found


def _numbers(value: object) -> int | tuple[int, ...] | None:
    """Return a number ≥ 0, or a tuple of them, also from text with commas; None for other values."""
    if isinstance(value, str):
        parts: list[object] = [int(part) if part.strip().isdecimal() else None for part in value.split(",")]
        value = parts[0] if len(parts) == 1 else parts
    found = [whole_number(part) for part in (value if isinstance(value, list | tuple) else [value])]
    numbers = tuple(part for part in found if part is not None and 0 <= part <= LARGEST_SIZE)
    if not numbers or len(numbers) < len(found):
        return None
    return numbers if isinstance(value, list | tuple) else numbers[0]


def _read_dtype(_name: str, value: object) -> object:
    """Return the short name of a dtype; torch's names are accepted, in any case."""
    word = value.lower() if isinstance(value, str) else value
    return _TYPES.get(word, word) if isinstance(word, str) else value


_TYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float64": "fp64"}
_READ: Mapping[str, Callable[[str, object], object]] = {
    "recompute": read_recompute,
    "stages": _read_stages,
    "dtype": _read_dtype,
    "gradients": _read_dtype,
}
