"""Costs of single layers under a strategy, from which `quintsched layout` cuts stages.

embedding │ dense × n │ mixture × n │ mtp: a layer and its projection │ loss: the head, once more for each mtp
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np

from quintsched.errors import UsageError
from quintsched.solve.stage_cuts.layer_costs import LayerCost, LayerCosts
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import check
from quintsched.strategies.prediction.block_times import Blocks
from quintsched.strategies.prediction.layers_of_ranks import Kinds
from quintsched.strategies.prediction.memory.peak_memory import COMES_AND_GOES
from quintsched.strategies.prediction.memory.vectorized_peak_memory import stage_terms
from quintsched.strategies.prediction.operator_device_times import operator_times
from quintsched.strategies.prediction.operators import Product
from quintsched.strategies.prediction.step_times import messages_s, per_microbatch
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, sizes_of

COLUMNS = ("embedding", "dense", "mixture", "loss")
TIMES = ("forward", "backward_input", "backward_weight")


def layer_costs(model: Model, hardware: Hardware, strategy: Strategy, mtp: int = 0) -> LayerCosts:
    """Return the costs of each layer: times in ms, memory in GB. Messages run beside computation.

    Args:
        model: the model.
        hardware: the hardware.
        strategy: the strategy, without stages or numbers of recomputed layers.
        mtp: layers of multi-token prediction after the model's own.

    Raises:
        UsageError: an invalid strategy, or one whose stages are given already.
    """
    if strategy.stages is not None or isinstance(strategy.recompute, int | tuple):
        raise UsageError("layers are cut into stages here; leave stages out, and give recompute as a word")
    check(model, hardware, strategy)
    table = Table.from_strategies([strategy])
    kinds = _kinds(strategy)
    found = distinct_blocks(model, hardware, table)
    each = per_microbatch(model, hardware, table, found, kinds)
    each = replace(each, pp=np.zeros_like(each.pp))
    held = stage_terms(model, table, kinds, sharded=True)
    sums = {"activation": np.zeros(len(COLUMNS)), "state": np.zeros(len(COLUMNS))}
    for name, bytes_ in held.items():
        if name not in COMES_AND_GOES:
            sums["activation" if name.startswith(("activations", "logits")) else "state"] += bytes_[0] / 1e9
    columns = {**{name: 1e3 * getattr(each, name)[0] for name in TIMES}, **sums}
    costs = {kind: {name: float(values[at]) for name, values in columns.items()} for at, kind in enumerate(COLUMNS)}
    kind_of = [("dense", "mixture")[place] for place in model.layer_kinds]
    layers = [LayerCost.of_kind("embedding", costs["embedding"])]
    layers += [LayerCost.of_kind("decoder", costs[kind], len(list(group))) for kind, group in groupby(kind_of)]
    if mtp:
        more = _projection(model, hardware, table, found, costs["loss"]["state"])
        joined = {name: value + more.get(name, 0.0) for name, value in costs[kind_of[-1]].items()}
        layers.append(LayerCost.of_kind("mtp", joined, mtp))
    repeated = {name: value * (1 if name == "state" else 1 + mtp) for name, value in costs["loss"].items()}
    layers.append(LayerCost.of_kind("loss", repeated))
    messages = (2.0 if strategy.pp_duplex else 4.0) * float(table.chunks[0])
    p2p = 1e3 * float(messages_s(model, hardware, table)[0]) / messages
    return LayerCosts(layers=tuple(layers), unit="ms", memory_unit="GB", p2p=p2p)


def _kinds(strategy: Strategy) -> Kinds:
    """Return the kinds of layers, a column each, in the order of `COLUMNS`."""
    one = np.eye(len(COLUMNS), dtype=np.float64)[:, None]
    again = one * (strategy.recompute == "full")
    ranks = np.ones((1, len(COLUMNS)))
    places = np.arange(len(COLUMNS), dtype=np.float64)[None]
    return Kinds(one[1], one[2], again[1], again[2], one[0], one[3], ranks, places, ranks)


def _projection(model: Model, hardware: Hardware, table: Table, found: Blocks, head_gb: float) -> dict[str, float]:
    """Return what a layer of multi-token prediction needs beyond a layer: the product that joins its two inputs."""
    dtype = table.values["dtype"][int(table.dtype[0])]
    sizes = sizes_of(table, dtype)
    narrow, wide = model.hidden / sizes.tp, np.full_like(sizes.tokens, 2.0 * model.hidden)
    joined = Product("mtp projection", sizes.tokens, narrow, wide, sizes.width, column=True)
    times = operator_times(joined, hardware, dtype, sizes.accumulated)
    share = float((narrow * wide)[0] / found.last.weights[0])
    return {**{name: 1e3 * float(getattr(times, name)[0]) for name in TIMES}, "state": head_gb * share}
