"""Memory of each kind of rank, for many strategies at once.

columns of strategies (n,) ─┐
                            ├──▶ terms (n, K), K the most kinds of ranks that one of them has
their kinds of ranks (n, K) ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import SHORT
from quintsched.strategies.prediction.layers_of_ranks import BIDIRECTIONAL, Kinds, RankKind, layers_of_stages
from quintsched.strategies.prediction.memory.activations import ACTIVATION_KINDS, ActivationSizes
from quintsched.strategies.prediction.memory.built_in_model_activations import own_activations, own_gathered
from quintsched.strategies.prediction.memory.in_flight_formulas import (
    KEEPS_LOGITS,
    first_in_flight,
    in_flight,
    logits_in_flight,
    stages_in_flight,
)
from quintsched.strategies.prediction.memory.peak_memory import RankLayers, Sharding, layer_bytes, memory_terms
from quintsched.strategies.prediction.strategy_columns import (
    Table,
    activation_caps,
    distinct,
    gradient_bytes,
    rerun_modules,
    widths,
)

FLIGHTS = ("in_flight", "stages_in_flight", "first_in_flight", "logits_in_flight")
ENOUGH = 4
"""Microbatches, in multiples of pp, after which a rank's stages hold no others at once."""


def held_terms(model: Model, hardware: Hardware, table: Table, kinds: Kinds) -> dict[str, NDArray[np.float64]]:
    """Return the bytes of every kind of rank, (n, K), by term, including the hardware's reserve.

    For a CPU, which is predicted for this project's runtime only, activations and ZeRO's temporary buffers are those of
    that runtime.
    """
    sizes, mesh = _cut(table)
    ranks = _ranks(model, table, kinds, sizes, mesh)
    terms = memory_terms(model, sizes, mesh, ranks)
    if hardware.runs_at_once:
        theirs = ("activations", "logits", "temporary")
        others = {name: bytes_ for name, bytes_ in terms.items() if not name.startswith(theirs)}
        whole = memory_terms(model, sizes, replace(mesh, zero=0 * mesh.zero), ranks)
        terms = others | own_activations(model, sizes, mesh, ranks) | {"gathered": own_gathered(whole, sizes, mesh)}
    if hardware.measured.kept:
        known = np.array([*hardware.measured.kept])
        nearest = known[np.abs(np.log(known / sizes.tp)).argmin(axis=1)]
        factor = np.array([hardware.measured.kept[tp] for tp in nearest])[:, None]
        of_layers = {f"activations_{kind}" for kind in ACTIVATION_KINDS} & {*terms}
        terms |= {name: terms[name] * factor for name in of_layers}
    terms["reserved"] = hardware.reserved_gb * 1e9
    return {name: np.broadcast_to(bytes_, kinds.dense.shape) for name, bytes_ in terms.items()}


def stage_terms(model: Model, table: Table, stages: Kinds, *, sharded: bool = False) -> dict[str, NDArray[np.float64]]:
    """Return the bytes of every stage, (n, K), with one microbatch's activations; `sharded`: over replicas, by ZeRO."""
    sizes, mesh = _cut(table)
    once = np.ones(stages.dense.shape)
    ranks = _ranks(model, table, stages, sizes, mesh)
    ranks = replace(ranks, in_flight=once, logits_in_flight=once)
    terms = memory_terms(model, sizes, mesh if sharded else replace(mesh, zero=0 * mesh.zero), ranks)
    return {name: np.broadcast_to(bytes_, stages.dense.shape) for name, bytes_ in terms.items()}


def _cut(table: Table) -> tuple[ActivationSizes, Sharding]:
    """Return the sizes and the mesh of strategies, as columns, (n, 1)."""

    def column(values: Any) -> Any:
        return np.asarray(values, np.float64)[:, None]

    sizes = ActivationSizes(
        microbatch=column(table.microbatch),
        seq=column(table.seq),
        tp=column(table.tp),
        cp=column(table.cp),
        sequence_parallel=column(table.sequence_parallel),
        element=column(widths(table)),
        short=column(np.array([SHORT.get(name, 0.0) for name in table.values["dtype"]])[table.dtype]),
    )
    mesh = Sharding(
        column(table.pp),
        column(table.dp),
        column(table.ep),
        column(table.zero),
        column(table.chunks),
        {module: column(values) for module, values in rerun_modules(table).items()},
        column(_pending(table)),
        column(gradient_bytes(table, at_least=4.0)),
        column(table.fused_accumulation),
        column((table.pp_duplex == 0) & (table.pp > 1) & (table.fused_accumulation == 0)),
        column(table.fused_loss),
    )
    return sizes, mesh


def _pending(table: Table) -> NDArray[np.float64]:
    """Return the fraction of gradients that ZeRO-2 and 3 hold in full while they accumulate microbatches.

    Under interleaved 1F1B, a rank's stages take turns of pp microbatches each, so that one accumulates at a time. What
    is reduced once, at the end, needs no shards besides.
    """
    every = table.reduced_every
    in_turn = np.where(table.is_scheduled("interleaved-1f1b") & (every <= table.pp), 1 / table.chunks, 1.0)
    once = every == table.microbatches
    waiting = np.where(once, 1 - 1 / table.sharing, in_turn)
    return np.where((table.zero >= 2) & (every > 1), waiting, 0.0)


def fullest(terms: Mapping[str, NDArray[np.float64]], kinds: Kinds) -> dict[str, NDArray[np.float64]]:
    """Return the terms of the kind of rank that holds most, (n,)."""
    total = np.where(kinds.ranks > 0, sum(terms.values()), -1.0)
    rows, most = np.arange(len(total)), total.argmax(axis=1)
    return {name: bytes_[rows, most] for name, bytes_ in terms.items()}


def _ranks(model: Model, table: Table, kinds: Kinds, sizes: ActivationSizes, mesh: Sharding) -> RankLayers:
    flight, (first, logits) = np.zeros_like(kinds.dense), np.zeros((2, len(kinds.dense), 1))
    caps = activation_caps(table)[:, None]  # of passes of a rank: under twins, of one of its two stages
    for code, schedule in enumerate(table.values["schedule"]):
        rows = np.flatnonzero(np.asarray(table.schedule) == code)
        if len(rows):
            pp, chunks, microbatches = (
                np.asarray(values)[rows, None] for values in (table.pp, table.chunks, table.microbatches)
            )
            rank = kinds.rank[rows].astype(np.int64)
            last = rank + np.maximum(kinds.ranks[rows].astype(np.int64), 1) - 1
            flight[rows] = in_flight(schedule, pp=pp, microbatches=microbatches, chunks=chunks, rank=rank, last=last)
            passes = np.maximum(caps[rows] * chunks, 1)
            first[rows] = np.minimum(first_in_flight(schedule, pp=pp, microbatches=microbatches, chunks=chunks), passes)
            logits[rows] = np.minimum(logits_in_flight(schedule, pp=pp, microbatches=microbatches), passes)
    own = flight.copy()
    _count_by_stage(model, table, kinds, layer_bytes(model, sizes, mesh), own)
    caps = caps / np.where(table.is_scheduled(*BIDIRECTIONAL), 2, 1)[:, None]
    layers = {one.name: getattr(kinds, one.name) for one in fields(RankKind)}
    return RankLayers(
        **layers, **dict(zip(FLIGHTS, (np.minimum(own, caps), np.minimum(flight, caps), first, logits), strict=True))
    )


def _count_by_stage(model: Model, table: Table, kinds: Kinds, of_layer: Any, flight: NDArray[np.float64]) -> None:
    """Set what is in flight where stages of a rank hold different layers, given the bytes of a layer, (n, 4)."""
    rows = np.flatnonzero((kinds.alike[:, 0] == 0) & ~table.is_scheduled(*KEEPS_LOGITS))
    if not len(rows):
        return
    table, pp = table.take_rows(rows), table.pp[rows]
    layouts, which = table.layouts
    enough = np.minimum(table.microbatches, ENOUGH * pp + table.microbatches % pp)
    first, groups = distinct([which, enough])
    for group, one in enumerate(first):
        layout, members = layouts[which[one]], rows[groups == group]
        held = stages_in_flight(layout.schedule, layout.pp, int(enough[one]), layout.chunks)
        kept = layers_of_stages(model, layout) @ of_layer[members].T  # (pp, stages of a rank, n)
        found = (held @ kept).max(axis=1) / np.maximum(kept.sum(axis=1), 1.0)
        starts = kinds.rank[members[0]][kinds.ranks[members[0]] > 0].astype(np.int64)
        flight[members, : len(starts)] = np.maximum.reduceat(found, starts).T
