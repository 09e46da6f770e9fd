"""Ranks that share the cores of one machine, as processes on a CPU do: two ranks on one core take twice as long.

    4 ranks, 2 cores     rank 0 ▓▓ ▓▓ ▓▓          a step takes at least   what one rank waits for
                         rank 1  ▓▓ ▓▓ ▓▓                          and   what all cores have to do, over their number
                         rank 2   ▓▓ ▓▓ ▓▓
                         rank 3    ▓▓ ▓▓ ▓▓       a bubble is no loss where other ranks compute meanwhile

Ranks of tp, cp and ep work in step: they compute at the same time, and each gets its part of the cores. Replicas and
stages of a pipeline do not, so that what keeps one waiting leaves its core to others. Messages keep cores busy too:
`Measured.link_work` and `all_reduce_work` say how much.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quintsched.descriptions.hardware import Curve, Hardware, Measured
from quintsched.prediction.columns import Table
from quintsched.prediction.efficiency import Constants, curve_rate, memory_s
from quintsched.prediction.operators import Array
from quintsched.prediction.stages import Kinds, PerMicrobatch

ACCUMULATED = 12.0
"""Bytes that adding a microbatch's gradient of a number to the sum reads and writes, in 32 bits."""


def shares_cores(hardware: Hardware) -> bool:
    """Whether ranks share cores, and it is known how many."""
    return hardware.measured is not None and hardware.measured.cores is not None


def in_step(each: PerMicrobatch, table: Table, hardware: Hardware, constants: Constants) -> PerMicrobatch:
    """Return what a rank does for a microbatch while the ranks that work in step with it compute as well."""
    measured, cores = _measured(hardware)
    together = table.tp * table.cp * table.ep
    slower = (np.maximum(1.0, together / cores) / _speed(measured, table.gpus))[:, None]
    added = memory_s(ACCUMULATED * (each.weights + each.expert_weights), hardware, constants)
    return replace(
        each,
        compute_forward=each.compute_forward * slower,
        compute_input=each.compute_input * slower,
        compute_weight=(each.compute_weight + added) * slower,
        recompute=each.recompute * slower,
    )


def cores_s(each: PerMicrobatch, table: Table, kinds: Kinds, hardware: Hardware) -> Array:
    """Return how long all cores are busy with the microbatches of a step; `each` is as `in_step` returns it."""
    measured, cores = _measured(hardware)
    together = table.tp * table.cp * table.ep
    computed = (each.compute_forward + each.compute_input + each.compute_weight + each.recompute) / np.maximum(
        1.0, together / cores
    )[:, None]
    of_message = _busy(measured.link, measured.link_work)
    work = (
        computed
        + (each.tp_forward + each.tp_backward) * _share(measured, table.tp)
        + each.cp * of_message
        + each.ep * _share(measured, table.ep)
        + each.pp * of_message / 2
        + (each.dp + each.dp_hidden) * _share(measured, table.dp * table.cp * table.ep)
    )
    replicas = table.gpus / table.pp
    found: Array = table.microbatches * replicas * (kinds.ranks * work).sum(axis=1) / cores
    return found


def reduced_s(alone: Array, table: Table, hardware: Hardware) -> Array:
    """Return the seconds of reductions that all groups of replicas do at a time, each of which takes `alone`."""
    measured, cores = _measured(hardware)
    busy: Array = table.gpus[:, None] * _share(measured, table.dp * table.cp * table.ep)
    found: Array = alone * np.maximum(1.0, busy / cores)
    return found


def stepped_s(alone: Array, table: Table, hardware: Hardware) -> Array:
    """Return the seconds of computations that all ranks do at a time, each of which takes `alone`."""
    measured, cores = _measured(hardware)
    found: Array = alone * (np.maximum(1.0, table.gpus / cores) / _speed(measured, table.gpus))[:, None]
    return found


def _measured(hardware: Hardware) -> tuple[Measured, int]:
    assert hardware.measured is not None
    assert hardware.measured.cores is not None
    return hardware.measured, hardware.measured.cores


def _speed(measured: Measured, ranks: Any) -> Array:
    """Return how fast a rank computes while it has a core, relative to one that is alone."""
    if not measured.sharing:
        return np.ones(len(ranks))
    numbers = sorted(measured.sharing)
    found: Array = np.interp(ranks, numbers, [measured.sharing[number] for number in numbers])
    return found


def _share(measured: Measured, ranks: Any) -> Array:
    """Return how many cores one rank's part of a sum over so many ranks keeps busy, of shape (n, 1)."""
    numbers = sorted(set(measured.all_reduce) & set(measured.all_reduce_work))
    if not numbers:
        return np.ones((len(ranks), 1))
    busy = [_busy(measured.all_reduce[number], measured.all_reduce_work[number]) / number for number in numbers]
    found: Array = np.interp(ranks, numbers, busy)[:, None]
    return found


def _busy(taken: Curve | None, work: Curve | None) -> float:
    """Return how many cores a message or a sum of a megabyte keeps busy in all."""
    if taken is None or work is None:
        return 1.0
    size = np.array([2.0**20])
    return float(curve_rate(taken, size)[0] / curve_rate(work, size)[0])
