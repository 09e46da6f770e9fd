"""Ranks that share the cores of one machine, as CPU processes do: two ranks on one core take twice as long.

    4 ranks, 2 cores     rank 0 ▓▓ ▓▓ ▓▓          a step takes at least   the time of one rank, waits included
                         rank 1  ▓▓ ▓▓ ▓▓                          and   the work of all ranks / number of cores
                         rank 2   ▓▓ ▓▓ ▓▓
                         rank 3    ▓▓ ▓▓ ▓▓       a bubble costs nothing while other ranks compute

Ranks of tp, cp and ep compute at the same time, so each gets its share of the cores. Replicas and pipeline stages do
not: a waiting rank leaves its core to others. Messages keep cores busy too: `MeasuredRates.link_work` and
`all_reduce_work` have the rates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quintsched.strategies.descriptions.hardware import Hardware, MeasuredRates
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.prediction.layers_of_ranks import Kinds, RankTimes
from quintsched.strategies.prediction.operator_device_times import curve_rate
from quintsched.strategies.prediction.operators import Array
from quintsched.strategies.prediction.predicted_collectives import all_reduce_s
from quintsched.strategies.prediction.strategy_columns import Table

LARGE_BYTES = 2.0**22
"""Bytes of a gradient bucket, as assumed for its reduction."""
STEP_SUMS = 2
"""All-reduces over all ranks per step: the metrics, and the gradient norm."""


def shares_cores(hardware: Hardware) -> bool:
    """Return whether ranks share a known number of cores, and the core time of messages is known."""
    measured = hardware.measured
    return measured.cores is not None and bool(measured.link_work and measured.link)


def in_step(each: RankTimes, table: Table, hardware: Hardware) -> RankTimes:
    """Return a rank's times per microbatch while the ranks that work in step with it compute as well.

    No message is hidden: a core that handles it does not compute.
    """
    measured, cores = _measured(hardware)
    slower = (np.maximum(1.0, _together(table) / cores) / _speed(measured, table.gpus))[:, None]
    none = np.zeros_like(each.tp_hidden)
    return replace(
        each,
        compute_forward=each.compute_forward * slower,
        compute_input=each.compute_input * slower,
        compute_weight=each.compute_weight * slower,
        accumulate=each.accumulate * slower,
        recompute=each.recompute * slower,
        tp_backward=each.tp_backward + each.tp_hidden,
        cp=each.cp + each.cp_hidden,
        ep=each.ep + each.ep_hidden,
        pp=each.pp + each.pp_hidden,
        dp=_sharded_s(each, table, hardware),
        tp_hidden=none,
        cp_hidden=none,
        ep_hidden=none,
        pp_hidden=none,
        dp_hidden=none,
    )


def _sharded_s(each: RankTimes, table: Table, hardware: Hardware) -> Array:
    """Return the reductions and gathers of ZeRO-2 and 3 per microbatch, with gloo.

    It implements reduce-scatter by all-reduce; if a rank has one stage only, weights are gathered once per step.
    """
    replicas, outer = table.sharing[:, None], (table.dp * table.cp)[:, None]
    stride, zero = table.tp[:, None], table.zero[:, None]
    gathers = np.where(table.chunks > 1, 1.0, 1.0 / table.microbatches)[:, None] / 2
    passes = (zero >= 2) * 1.0 + (zero == 3) * gathers

    def summed(numbers: Array, ranks: Any) -> Array:
        return all_reduce_s(4.0 * numbers, ranks, stride, hardware)

    found: Array = passes * (summed(each.weights, replicas) + summed(each.expert_weights, outer))
    return found


def cores_s(each: RankTimes, model: Model, table: Table, kinds: Kinds, hardware: Hardware, width: Array) -> Array:
    """Return the time that the cores need for the microbatches of a step; 0 if each rank has a core of its own.

    While a pipeline fills and drains, fewer of its ranks compute than there are cores: of `c` cores per replica, c - 1
    are idle for as long as a microbatch takes on one rank.

    Args:
        each: times of a rank, as `in_step` returns them.
        model: for the size of messages.
        table: the strategies.
        kinds: kinds of ranks of the strategies.
        hardware: for the number of cores.
        width: bytes of an element.
    """
    measured, cores = _measured(hardware)
    slower = np.maximum(1.0, _together(table) / cores)[:, None]
    tokens = table.microbatch * table.seq / table.cp * model.hidden * width
    assert measured.link is not None
    assert measured.link_work is not None
    of_message = (curve_rate(measured.link, tokens) / curve_rate(measured.link_work, tokens))[:, None]
    computed = (each.compute_forward + each.compute_input + each.backward_weight + each.recompute) / slower
    work = (
        computed
        + (each.tp_forward + each.tp_backward) * _share(measured, table.tp, tokens)
        + each.cp * of_message
        + each.ep * _share(measured, table.ep, tokens)
        + each.pp * of_message * (1 - 1 / table.pp)[:, None]
        + each.dp * _share(measured, table.sharing, LARGE_BYTES)
    )
    ranks = table.gpus / table.pp
    busy = table.microbatches * ranks * (kinds.ranks * work).sum(axis=1) / cores
    idle = np.maximum(cores / ranks - 1, 0.0) * np.where(kinds.ranks > 0, each.total, 0.0).max(axis=1)
    return np.where(table.gpus > cores, busy + np.where(table.pp > 1, idle, 0.0), 0.0)


def shared_sums_s(table: Table, hardware: Hardware) -> Array:
    """Return the seconds of a step's small all-reduces over all ranks: loss with its weight, and gradient norm."""
    small = np.full(len(table.gpus), 8.0)
    return STEP_SUMS * all_reduce_s(small, table.gpus, np.ones_like(table.gpus), hardware)


def reduced_s(alone: Array, table: Table, hardware: Hardware) -> Array:
    """Return the seconds of reductions by all groups of replicas at once, each of which takes `alone` by itself."""
    measured, cores = _measured(hardware)
    busy: Array = table.gpus[:, None] * _share(measured, table.sharing, LARGE_BYTES)
    found: Array = alone * np.maximum(1.0, busy / cores)
    return found


def stepped_s(alone: Array, table: Table, hardware: Hardware) -> Array:
    """Return the seconds of computations by all ranks at once, each of which takes `alone` by itself."""
    measured, cores = _measured(hardware)
    found: Array = alone * (np.maximum(1.0, table.gpus / cores) / _speed(measured, table.gpus))[:, None]
    return found


def _measured(hardware: Hardware) -> tuple[MeasuredRates, int]:
    assert hardware.measured.cores is not None
    return hardware.measured, hardware.measured.cores


def _together(table: Table) -> Any:
    """Return the number of ranks that work in step."""
    return table.tp * table.cp * table.ep


def _speed(measured: MeasuredRates, ranks: Any) -> Array:
    """Return the speed of a rank while it has a core, relative to a single process."""
    numbers = sorted(measured.sharing)
    found: Array = np.interp(ranks, numbers, [measured.sharing[number] for number in numbers])
    return found


def _share(measured: MeasuredRates, ranks: Any, moved: Any) -> Array:
    """Return the number of cores that one rank's part of an all-reduce over `ranks` takes from others, (n, 1)."""
    numbers, size = sorted(measured.all_reduce_work), np.broadcast_to(moved, np.shape(ranks))
    taken = np.stack(
        [
            curve_rate(measured.all_reduce[number], size) / curve_rate(measured.all_reduce_work[number], size) / number
            for number in numbers
        ]
    )
    nearest = np.abs(np.asarray(numbers)[:, None] - ranks).argmin(axis=0)
    found: Array = taken[nearest, np.arange(len(nearest))][:, None]
    return found
