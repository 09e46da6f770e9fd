"""Rules of tensor parallelism for layers: how a layer is cut, and the fused blocks of its outputs.

column                               the outputs are cut, as names and sizes determine
{cut: column, parts: 3}              three equal blocks, such as [q; k; v]: each rank has its shard of every one
{cut: column, parts: [4, 2, 2]}      blocks of these proportions: four heads of queries, two of keys, two of values
{cut: column, parts: 1}              one block: a head's queries, keys and values are adjacent (heads, 3, size)
{cut: column, sizes: [num_heads]}    attributes of the module with sizes that are cut, which are divided too
{cut: row, alone: true}              takes and returns full tensors, whatever is beside it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from quintsched.errors import suggest


class TensorSplit(Enum):
    """Cut of a layer by tensor parallelism."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATE = "replicate"


FusedParts = int | tuple[int, ...]
"""Fused blocks of a layer's outputs: number of equal ones, or their proportions."""


@dataclass(frozen=True)
class TensorRule:
    """Rule for a layer; `parts` and `sizes` are None where names and sizes decide."""

    split: TensorSplit
    parts: FusedParts | None = None
    sizes: tuple[str, ...] | None = None
    """Attributes of the surrounding module that are divided, "num_heads" or "config.num_heads"."""
    alone: bool = False
    """Whether it takes and returns full tensors."""


def read_rule(value: object) -> TensorRule:
    """Return the rule that a string or a mapping describes; raises `ValueError` with the fault."""
    if not isinstance(value, Mapping):
        return TensorRule(_split_of(value))
    unknown = [key for key in value if key not in ("cut", "parts", "sizes", "alone")]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; a rule has 'cut', 'parts', 'sizes' and 'alone'")
    split, parts, sizes, alone = (_split_of(value.get("cut")), *(value.get(k) for k in ("parts", "sizes", "alone")))
    if parts is not None and split is not TensorSplit.COLUMN:
        raise ValueError(f"only a column has parts, not {split.value!r}")
    if not isinstance(alone, bool | None):
        raise ValueError(f"alone is true or false, not {alone!r}")
    if alone and split not in (TensorSplit.COLUMN, TensorSplit.ROW):
        raise ValueError(f"a column or a row can be alone, not {split.value!r}")
    return TensorRule(split, None if parts is None else _parts_of(parts), _sizes_of(sizes), bool(alone))


def _sizes_of(sizes: object) -> tuple[str, ...] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, list | tuple) or not all(isinstance(name, str) for name in sizes):
        raise ValueError(f"sizes are a list of names of attributes, not {sizes!r}")
    return tuple(sizes)


def _split_of(name: object) -> TensorSplit:
    names = [split.value for split in TensorSplit]
    if name not in names:
        raise ValueError(f"unknown split {name!r}" + (suggest(name, names) if isinstance(name, str) else ""))
    return TensorSplit(name)


def _parts_of(parts: object) -> FusedParts:
    found = tuple(parts) if isinstance(parts, list | tuple) else (parts,)
    if not found or any(isinstance(part, bool) or not isinstance(part, int) or part < 1 for part in found):
        raise ValueError(f"parts are a number of equal blocks or a list of proportions, not {parts!r}")
    return found if isinstance(parts, list | tuple) else found[0]
