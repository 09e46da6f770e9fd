"""Vectorized prediction: time and memory of a step for many strategies, in numpy columns.

    strategies ──▶ Table (columns) ──┬─ blocks: once per distinct (tp, cp, ep, sp, microbatch, seq, dtype)
                                     ├─ kinds of ranks: once per distinct (pp, chunks, schedule, stages, recompute)
                                     └─ the rest: arithmetic on columns ──▶ Evaluated

Strategies are not validated here: see `placement.check`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import MODULES, WIDTHS, modules_of
from quintsched.strategies.prediction.block_times import Blocks, blocks
from quintsched.strategies.prediction.layers_of_ranks import Kinds, LayerLayout, kinds
from quintsched.strategies.prediction.memory.vectorized_peak_memory import held_terms
from quintsched.strategies.prediction.operators import Array, BlockSizes
from quintsched.strategies.prediction.step_times import step_terms
from quintsched.strategies.prediction.strategy_columns import Table, distinct, gradient_bytes, rerun_modules

ROWS_AT_ONCE = 1 << 15
"""Number of rows processed at a time, so that columns stay in the processor's cache."""

TIMED_KERNELS = ("tp_overlap", "fused_loss", "fused_accumulation", "gradients")
"""Columns of what kernels do at once."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Predicted time and memory of a step for each of n strategies."""

    table: Table
    step_s: Array
    memory_bytes: Array
    """Peak memory of the rank that holds most."""
    fits: NDArray[np.bool_]
    seconds: dict[str, Array]
    """Terms of the time by name; those that do not end in `_hidden` add up to `step_s`."""
    bytes: dict[str, Array]
    """Terms of the memory of the rank that holds most, by name; they add up to `memory_bytes`."""
    exact: NDArray[np.bool_]
    """False if the time is a lower bound."""


def evaluate(model: Model, hardware: Hardware, table: Table, *, simulate: bool = False) -> Evaluated:
    """Return time and memory of every row of a table.

    Without a closed form, the time is a lower bound, or, with `simulate`, comes from a simulation.
    """
    stages, parts = partial(distinct_stages, model) if simulate else None, []
    for start in range(0, len(table), ROWS_AT_ONCE):
        rows = table.take_rows(slice(start, start + ROWS_AT_ONCE))
        found = distinct_blocks(model, hardware, rows)
        parts.append(step_terms(model, hardware, rows, found, distinct_kinds(model, rows), stages))
    seconds = {name: _joined([part[0][name] for part in parts]) for name in parts[0][0]}
    held = {name: _joined([part[1][name] for part in parts]) for name in parts[0][1]}
    step_s = np.asarray(sum(values for name, values in seconds.items() if not name.endswith("_hidden")))
    memory = np.asarray(sum(held.values()))
    exact = _joined([part[2] for part in parts])
    return Evaluated(table, step_s, memory, memory <= hardware.memory_gb * 1e9, seconds, held, exact)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def held(model: Model, hardware: Hardware, table: Table, *, each_rank: bool = False) -> tuple[dict[str, Array], Kinds]:
    """Return the bytes of every kind of rank by term, (n, K); `each_rank`: one kind per rank."""
    found = distinct_kinds(model, table, each_rank=each_rank)
    return held_terms(model, hardware, table, found), found


def distinct_blocks(model: Model, hardware: Hardware, table: Table) -> Blocks:
    """Return the block times of every row, computed once per distinct key."""
    names = ("tp", "cp", "ep", "sequence_parallel", "microbatch", "seq", "dtype", *TIMED_KERNELS)
    modules = np.array(
        [sum(1 << MODULES.index(one) for one in modules_of(value)) for value in table.values["recompute"]]
    )
    columns = (*(getattr(table, name) for name in names), table.exchanges_beside.astype(np.int64))
    first, inverse = distinct([*columns, modules[table.recompute]])
    keys = table.take_rows(first)
    made: list[Blocks] = []
    order: list[Ints] = []
    for code, dtype in enumerate(table.values["dtype"]):
        rows = np.flatnonzero(keys.dtype == code)
        if len(rows):
            made.append(blocks(model, hardware, sizes_of(keys.take_rows(rows), dtype), dtype))
            order.append(rows)
    return reduce(Blocks.joined, made).take_rows(np.argsort(np.concatenate(order))[inverse])


def distinct_kinds(model: Model, table: Table, *, each_rank: bool = False) -> Kinds:
    """Return the kinds of ranks of every row, computed once per distinct layout."""
    layouts, which = table.layouts
    return kinds(model, layouts, each_rank=each_rank).take_layouts(which)


def distinct_stages(model: Model, table: Table) -> Kinds:
    """Return the stages of every row, as if each were on a rank of its own."""
    layouts, which = table.layouts
    apart = [LayerLayout(each.pp * each.chunks, 1, "1f1b", each.stages, each.recompute) for each in layouts]
    return kinds(model, apart, each_rank=True).take_layouts(which)


def sizes_of(table: Table, dtype: str) -> BlockSizes:
    """Return the columns that block times depend on, for a table of one dtype."""
    columns = {
        name: getattr(table, name).astype(np.float64)
        for name in ("tp", "cp", "ep", "sequence_parallel", "microbatch", "seq")
    }
    return BlockSizes(
        **columns,
        width=np.full(len(table), WIDTHS[dtype]),
        accumulated=2 * gradient_bytes(table) * table.fused_accumulation,
        fused_loss=table.fused_loss.astype(np.float64),
        tp_overlap=table.tp_overlap.astype(np.float64),
        ep_overlap=table.exchanges_beside.astype(np.float64),
        rerun=rerun_modules(table),
    )
