"""What a rule of tensor parallelism says of a layer: how it is cut, and of which fused blocks its outputs consist.

column                               the outputs are cut, as names and sizes have it
{cut: column, parts: 3}              three equal blocks, such as [q; k; v]: each rank has its shard of every one
{cut: column, parts: [4, 2, 2]}      blocks of these proportions: four heads of queries, two of keys, two of values
{cut: column, parts: 1}              one block: a head's queries, keys and values lie side by side (heads, 3, size)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quintsched.errors import suggest

from .choices import TensorSplit

Parts = int | tuple[int, ...]
"""The fused blocks of a layer's outputs: how many equal ones, or their proportions."""


@dataclass(frozen=True)
class TensorRule:
    """What to do with a layer; `parts` is None where names and sizes decide."""

    split: TensorSplit
    parts: Parts | None = None


def read_rule(value: object) -> TensorRule:
    """Return the rule that a string or a mapping stands for; raises `ValueError` that says what is wrong."""
    if not isinstance(value, Mapping):
        return TensorRule(_split_of(value))
    unknown = [key for key in value if key not in ("cut", "parts")]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; a rule has 'cut' and 'parts'")
    split, parts = _split_of(value.get("cut")), value.get("parts")
    if parts is None:
        return TensorRule(split)
    if split is not TensorSplit.COLUMN:
        raise ValueError(f"only a column has parts, not {split.value!r}")
    return TensorRule(split, _parts_of(parts))


def _split_of(name: object) -> TensorSplit:
    names = [split.value for split in TensorSplit]
    if name not in names:
        raise ValueError(f"unknown split {name!r}" + (suggest(name, names) if isinstance(name, str) else ""))
    return TensorSplit(name)


def _parts_of(parts: object) -> Parts:
    found = tuple(parts) if isinstance(parts, list | tuple) else (parts,)
    if not found or any(isinstance(part, bool) or not isinstance(part, int) or part < 1 for part in found):
        raise ValueError(f"parts are a number of equal blocks or a list of proportions, not {parts!r}")
    return found if isinstance(parts, list | tuple) else found[0]
