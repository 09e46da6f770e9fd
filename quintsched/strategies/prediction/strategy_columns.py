"""Table of strategies in columns of integers, for vectorized prediction.

Strategy(tp=8, pp=4, …)  ─┐         tp [8 4 …]  pp [4 8 …]  …   schedule [0 1 …]
Strategy(tp=4, pp=8, …)  ─┴─▶ Table                              values {"schedule": ("1f1b", "zbv")}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import resolved

Ints = NDArray[np.int64]
CODED = ("schedule", "recompute", "dtype", "stages")
"""Columns that hold an index into the distinct values of `Table.values`."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of n strategies, of length n, named as the fields of Strategy."""

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
    overlap: Ints
    schedule: Ints
    recompute: Ints
    dtype: Ints
    stages: Ints
    values: dict[str, tuple[Any, ...]]
    """Values of the codes in the columns CODED."""

    @classmethod
    def of(cls, strategies: Iterable[Strategy]) -> Table:
        """Return a table of strategies, with defaults of `chunks` and `schedule` filled in."""
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
        """Number of replicas that share the batch."""
        return self.dp * self.ep

    @property
    def microbatches(self) -> Ints:
        """Number of microbatches per replica."""
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
        return Strategy(
            **{**found, "sequence_parallel": bool(found["sequence_parallel"]), "overlap": bool(found["overlap"])}
        )


def distinct(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination, and for every row the index of its combination."""
    key, room = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        span = int(column.max()) + 1
        if room * span >= 2**62:
            _, key = np.unique(key, return_inverse=True)
            room = int(key.max()) + 1
        key, room = key * span + column, room * span
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse
