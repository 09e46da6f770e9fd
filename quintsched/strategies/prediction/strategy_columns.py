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

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.strategy import MODULES, WIDTHS, Strategy, modules_of
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.layers_of_ranks import PAIRED, LayerLayout

CODED = ("schedule", "recompute", "dtype", "gradients", "offload", "stages")
"""Columns that hold an index into the distinct values of `Table.values`."""
SWITCH_COLUMNS = tuple(name for name, field in Strategy.model_fields.items() if field.annotation is bool)
"""Columns of 0 and 1."""


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
    zero_every: Ints
    overlap: Ints
    pp_duplex: Ints
    ep_overlap: Ints
    tp_overlap: Ints
    fused_accumulation: Ints
    fused_loss: Ints
    schedule: Ints
    recompute: Ints
    dtype: Ints
    gradients: Ints
    offload: Ints
    stages: Ints
    values: dict[str, tuple[Any, ...]]
    """Values of the codes in the columns CODED."""

    @classmethod
    def from_strategies(cls, strategies: Iterable[Strategy]) -> Table:
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
    def sharing(self) -> Ints:
        """Number of ranks that hold the same weights, except for experts."""
        return self.replicas * self.cp

    @property
    def microbatches(self) -> Ints:
        """Number of microbatches per replica."""
        return self.batch // (self.replicas * self.microbatch)

    @property
    def reduced_every(self) -> Ints:
        """Microbatches after which ZeRO-2 and 3 reduce gradients."""
        return np.minimum(self.zero_every, self.microbatches)

    def is_scheduled(self, *names: str) -> NDArray[np.bool_]:
        """Return whether each strategy has one of these schedules."""
        return np.array([name in names for name in self.values["schedule"]])[self.schedule]

    @property
    def exchanges_beside(self) -> NDArray[np.bool_]:
        """Whether tokens go to experts beside another microbatch's computation."""
        return self.is_scheduled(*PAIRED) | self.is_scheduled("interleaved-1f1b") & (self.ep_overlap > 0)

    @property
    def layouts(self) -> tuple[list[LayerLayout], Ints]:
        """Distinct layouts of layers, and the index of each strategy's layout."""
        names = [field.name for field in fields(LayerLayout)]
        first, which = distinct([getattr(self, name) for name in names])
        columns = [self._values_of(name, first) for name in names]
        return [LayerLayout(*one) for one in zip(*columns, strict=True)], which

    def _values_of(self, name: str, rows: Ints) -> list[Any]:
        """Return the values of a column in these rows."""
        column = getattr(self, name)[rows].tolist()
        return [self.values[name][code] for code in column] if name in CODED else column

    def take_rows(self, index: slice | NDArray[Any]) -> Table:
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
        return Strategy(**found | {name: bool(found[name]) for name in SWITCH_COLUMNS})


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


REDUCED = {"fp16": 2.0, "fp8": 4.0, "mxfp8": 4.0, "bf16": 4.0, "fp32": 4.0, "fp64": 8.0}
"""Bytes of a gradient in its reduction over replicas, by dtype: as in Megatron-LM, where fp16 uses loss scaling."""


def widths(table: Table) -> NDArray[np.float64]:
    """Return the bytes of an element of each strategy's weights and activations."""
    return _of_codes(table.values["dtype"], WIDTHS)[table.dtype]


def activation_caps(table: Table) -> NDArray[np.float64]:
    """Return the most microbatches of a whole rank whose activations each strategy keeps; inf: no limit."""
    return np.array([np.inf if cap is None else cap for cap in table.values["offload"]])[table.offload]


def gradient_bytes(table: Table, *, at_least: float = 0.0) -> NDArray[np.float64]:
    """Return the bytes of an element of a gradient in its reduction; `at_least`: unless the strategy says its type."""
    usual = np.maximum(_of_codes(table.values["dtype"], REDUCED)[table.dtype], at_least)
    said = _of_codes(table.values["gradients"], WIDTHS)[table.gradients]
    return np.where(said > 0, said, usual)


def rerun_modules(table: Table) -> dict[str, NDArray[np.float64]]:
    """Return for each module whether each strategy recomputes it: 1 or 0."""
    named = [modules_of(value) for value in table.values["recompute"]]
    return {module: np.array([float(module in names) for names in named])[table.recompute] for module in MODULES}


def _of_codes(names: Sequence[str | None], values: dict[str, float]) -> NDArray[np.float64]:
    return np.array([values.get(name, 0.0) if name else 0.0 for name in names])
