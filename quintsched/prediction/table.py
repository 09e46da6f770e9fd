"""Many strategies at once: the time and the memory of a step, in numpy columns.

    strategies ──▶ Table (columns) ──┬─ blocks: once per distinct (tp, cp, ep, sp, microbatch, seq, dtype)
                                     ├─ kinds of ranks: once per distinct (pp, chunks, schedule, stages, recompute)
                                     └─ the rest: arithmetic on columns ──▶ Evaluated

Nothing is checked here: `placement.check` says whether a strategy can be placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.descriptions.hardware import Hardware
from quintsched.descriptions.model import Model
from quintsched.descriptions.strategy import Strategy
from quintsched.prediction.blocks import WIDTHS, Blocks, blocks
from quintsched.prediction.efficiency import CONSTANTS, Constants
from quintsched.prediction.operators import Array, Sizes
from quintsched.prediction.stages import Kinds, Layout, kinds
from quintsched.prediction.totals import held_terms, per_microbatch, step_terms

Ints = NDArray[np.int64]
CODED = ("schedule", "recompute", "dtype", "stages")
"""Columns that hold an index into the distinct values of `Table.values`."""
ROWS_AT_ONCE = 1 << 16
"""So many rows are worked on at a time, so that columns stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Table:
    """n strategies as columns of length n, named as the fields of Strategy."""

    gpus: Ints
    dp: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    microbatch: Ints
    batch: Ints
    seq: Ints
    chunks: Ints
    sequence_parallel: Ints
    zero: Ints
    schedule: Ints
    recompute: Ints
    dtype: Ints
    stages: Ints
    values: dict[str, tuple[Any, ...]]
    """What the codes of the columns in CODED stand for."""

    @classmethod
    def of(cls, strategies: Iterable[Strategy]) -> Table:
        """Return strategies as a table; defaults of `chunks` and `schedule` are filled in."""
        rows = [resolved(strategy) for strategy in strategies]
        columns: dict[str, Ints] = {}
        values: dict[str, tuple[Any, ...]] = {}
        for name in (field.name for field in fields(cls) if field.name != "values"):
            column = [getattr(row, name) for row in rows]
            if name in CODED:
                values[name] = tuple(dict.fromkeys(column))
                column = [values[name].index(value) for value in column]
            columns[name] = np.array(column, dtype=np.int64)
        return cls(**columns, values=values)

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def replicas(self) -> Ints:
        """How many share out the batch."""
        return self.dp * self.ep

    @property
    def microbatches(self) -> Ints:
        """Of each replica."""
        return self.batch // (self.replicas * self.microbatch)

    def take(self, index: slice | NDArray[Any]) -> Table:
        """Return the table of these rows."""
        columns = {field.name: getattr(self, field.name)[index] for field in fields(self) if field.name != "values"}
        return Table(**columns, values=self.values)

    def strategy(self, row: int) -> Strategy:
        """Return a row as a Strategy."""
        found: dict[str, Any] = {}
        for field in fields(self):
            if field.name != "values":
                code = int(getattr(self, field.name)[row])
                found[field.name] = self.values[field.name][code] if field.name in CODED else code
        return Strategy(**{**found, "sequence_parallel": bool(found["sequence_parallel"])})


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What a step of each of n strategies takes and holds."""

    table: Table
    step_s: Array
    memory_bytes: Array
    """Of the fullest rank."""
    fits: NDArray[np.bool_]
    seconds: dict[str, Array]
    """Terms by name; those that do not end in `_hidden` add up to `step_s`."""
    bytes: dict[str, Array]
    """Terms of the fullest rank by name; they add up to `memory_bytes`."""


def resolved(strategy: Strategy) -> Strategy:
    """Return a strategy with its schedule and chunks filled in."""
    chunks, schedule = strategy.chunks, strategy.schedule
    if schedule is None:
        schedule = "interleaved-1f1b" if (chunks or 1) > 1 and strategy.pp > 1 else "1f1b"
    if chunks is None:
        chunks = 2 if schedule in TWO_CHUNKS else 1
    return strategy.model_copy(update={"chunks": chunks, "schedule": schedule})


TWO_CHUNKS = frozenset({"interleaved-1f1b", "interleaved-zb", "bfs", "zbv", "v-half", "v-min", "dualpipe-v"})
"""Schedules that take two chunks at least."""


def evaluate(model: Model, hardware: Hardware, table: Table, constants: Constants = CONSTANTS) -> Evaluated:
    """Return time and memory of every row of a table."""
    parts = [
        _evaluate(model, hardware, table.take(slice(start, start + ROWS_AT_ONCE)), constants)
        for start in range(0, len(table), ROWS_AT_ONCE)
    ]
    seconds = {name: np.concatenate([part[0][name] for part in parts]) for name in parts[0][0]}
    held = {name: np.concatenate([part[1][name] for part in parts]) for name in parts[0][1]}
    step_s = np.asarray(sum(values for name, values in seconds.items() if not name.endswith("_hidden")))
    memory = np.asarray(sum(held.values()))
    return Evaluated(table, step_s, memory, memory <= hardware.memory_gb * 1e9, seconds, held)


def _evaluate(
    model: Model, hardware: Hardware, table: Table, constants: Constants
) -> tuple[dict[str, Array], dict[str, Array]]:
    found = distinct_blocks(model, hardware, table, constants)
    return step_terms(model, hardware, table, found, distinct_kinds(model, table), constants)


def held(
    model: Model, hardware: Hardware, table: Table, constants: Constants = CONSTANTS, *, each_rank: bool = False
) -> tuple[dict[str, Array], Kinds]:
    """Return the bytes that every kind of rank holds, (n, K) by kind of bytes; `each_rank`: every rank is a kind."""
    found = distinct_kinds(model, table, each_rank=each_rank)
    blocks_of = distinct_blocks(model, hardware, table, constants)
    each = per_microbatch(model, hardware, table, blocks_of, found, constants)
    return held_terms(model, hardware, table, each, found), found


def distinct_blocks(model: Model, hardware: Hardware, table: Table, constants: Constants = CONSTANTS) -> Blocks:
    """Return the block times of every row, worked out once for each distinct key."""
    names = ("tp", "cp", "ep", "sequence_parallel", "microbatch", "seq", "dtype")
    first, inverse = distinct([getattr(table, name) for name in names])
    keys = table.take(first)
    made: list[Blocks] = []
    order: list[Ints] = []
    for code, dtype in enumerate(table.values["dtype"]):
        rows = np.flatnonzero(keys.dtype == code)
        if len(rows):
            made.append(blocks(model, hardware, sizes_of(keys.take(rows), dtype), dtype, constants))
            order.append(rows)
    return reduce(Blocks.joined, made).take(np.argsort(np.concatenate(order))[inverse])


def distinct_kinds(model: Model, table: Table, *, each_rank: bool = False) -> Kinds:
    """Return the kinds of ranks of every row, worked out once for each distinct layout."""
    names = ("pp", "chunks", "schedule", "stages", "recompute")
    first, inverse = distinct([getattr(table, name) for name in names])
    layouts = [
        Layout(
            int(table.pp[row]),
            int(table.chunks[row]),
            table.values["schedule"][table.schedule[row]],
            table.values["stages"][table.stages[row]],
            table.values["recompute"][table.recompute[row]],
        )
        for row in first
    ]
    return kinds(model, layouts, each_rank=each_rank).take(inverse)


def sizes_of(table: Table, dtype: str) -> Sizes:
    """Return the columns that block times depend on, of a table of one dtype."""
    columns = {
        name: getattr(table, name).astype(np.float64)
        for name in ("tp", "cp", "ep", "sequence_parallel", "microbatch", "seq")
    }
    return Sizes(**columns, width=np.full(len(table), WIDTHS[dtype]))


def distinct(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination, and for every row which of those it is."""
    key, room = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        span = int(column.max()) + 1
        if room * span >= 2**62:
            _, key = np.unique(key, return_inverse=True)
            room = int(key.max()) + 1
        key, room = key * span + column, room * span
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse
