"""From blocks to a step: times of each pipeline rank per microbatch, the pipeline, and the end of the step.

    rank:  ▕ layers · (forward + backward + recompute + exposed communication) ▏ × microbatches
    step = the slowest rank's microbatches + the bubble around them + gradient reduction + optimizer

Every quantity of a rank is an array (n, K): n strategies, K kinds of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.prediction.block_times import Blocks, Layer
from quintsched.strategies.prediction.layers_of_ranks import BIDIRECTIONAL, PAIRED, Kinds, RankTimes
from quintsched.strategies.prediction.memory.vectorized_peak_memory import fullest, held_terms
from quintsched.strategies.prediction.operator_device_times import curve_rate, memory_rate, memory_s
from quintsched.strategies.prediction.operators import Array
from quintsched.strategies.prediction.pipeline.formula_bound_or_simulation import StageTimes, spans
from quintsched.strategies.prediction.pipeline.runs_of_equal_ranks import RowNumbers
from quintsched.strategies.prediction.predicted_collectives import message_s, overlap, ring_s
from quintsched.strategies.prediction.ranks_on_shared_cores import (
    cores_s,
    in_step,
    reduced_s,
    shared_sums_s,
    shares_cores,
    stepped_s,
)
from quintsched.strategies.prediction.strategy_columns import Table, gradient_bytes, widths

STEP_BYTES = 66.0
"""Bytes that an optimizer step reads and writes per parameter updated by a rank: its gradient is cleared (4), divided
by the number of replicas (8), unscaled (8), its norm taken (4), clipped (8); Adam reads master, gradient and two
moments and writes three of them (28); the master is rounded into the weight (6)."""
CLEAR_BYTES, DIVIDE_BYTES = 4.0, 8.0
"""Parts of these for gradients of all parameters of a rank, also where it updates a shard: they are divided before they
are reduced (Megatron-LM's distributed optimizer, DeepSpeed, FSDP), and cleared if they stay resident (ZeRO-0, 1)."""
ADAM_BYTES = 28.0
"""Part of these for Adam itself, which a calibration measures."""


def step_terms(
    model: Model,
    hardware: Hardware,
    table: Table,
    blocks: Blocks,
    kinds: Kinds,
    stages: Callable[[Table], Kinds] | None = None,
) -> tuple[dict[str, Array], dict[str, Array], NDArray[np.bool_]]:
    """Return the terms of a step's time, the terms of the peak memory, and whether the time is exact.

    If the schedule has no closed form, the bubble is a lower bound; if `stages` is given (it returns the stages of such
    strategies), it is simulated.
    """
    ways = np.where(table.is_scheduled(*BIDIRECTIONAL), 2, 1)
    each = _of_one_way(per_microbatch(model, hardware, table, blocks, kinds, 1 / ways), ways[:, None])
    shares = shares_cores(hardware)
    if shares:
        each = in_step(each, table, hardware)
    microbatches = table.microbatches.astype(np.float64)
    held = kinds.ranks > 0
    total = np.where(held, each.total, -1.0)
    busiest = total.argmax(axis=1)
    rows = np.arange(len(busiest))
    seconds = {name: microbatches * values[rows, busiest] for name, values in _by_term(each).items()}
    reduction, gathering = reduce_s(hardware, table, each)
    whole = reduction
    ends = end_times(model, hardware, table, blocks)
    _, of_ends = reduce_s(hardware, table, ends)
    stepping = optimizer_s(hardware, table, each)
    if shares:
        reduction, gathering = (reduced_s(part, table, hardware) for part in (reduction, gathering))
        stepping = stepped_s(stepping, table, hardware)
        whole = reduction
    else:
        reduction, gathering = beside_passes(hardware, table, each, kinds, reduction, gathering, of_ends, ways)

    def of_rows(rows: RowNumbers) -> StageTimes:
        assert stages is not None
        some = table.take_rows(rows)
        return stage_times(model, hardware, some, blocks.take_rows(rows), stages(some))

    ends = in_step(ends, table, hardware) if shares else ends
    least = reduction - whole * (1 - 1 / table.chunks)[:, None]
    found = spans(table, each, ends, kinds, reduction, of_rows if stages else None, tied=model.tied, least=least)
    makespan, summing = found.makespan, whole.max(axis=1)
    exposed = np.where((table.overlap > 0) & (not shares), found.exposed, summing)
    seconds["bubble"] = np.maximum(makespan - microbatches * total[rows, busiest], 0.0)
    seconds["dp"] = seconds["dp"] + exposed + gathering.max(axis=1)
    seconds["dp_hidden"] = seconds["dp_hidden"] + np.maximum(summing - exposed, 0.0)
    seconds["optimizer"] = stepping.max(axis=1)
    if shares:
        seconds["cores"] = np.maximum(cores_s(each, model, table, kinds, hardware, widths(table)) - makespan, 0.0)
        seconds["sums"] = shared_sums_s(table, hardware)
    return seconds, fullest(held_terms(model, hardware, table, kinds), kinds), found.exact


def end_times(model: Model, hardware: Hardware, table: Table, blocks: Blocks) -> RankTimes:
    """Return the times of the embedding and the head for one microbatch, without messages, (n, 2)."""
    none, one = np.zeros((len(table), 2)), np.ones((len(table), 2))
    only = Kinds(none, none, none, none, one * (1, 0), one * (0, 1), one, none, one)
    found = per_microbatch(model, hardware, table, blocks, only)
    return replace(found, pp=none, pp_hidden=none)


def _by_term(each: RankTimes) -> dict[str, Array]:
    """Return a microbatch's time on each rank, by the term of a step that it belongs to."""
    others = ("cp", "ep", "pp", "dp", "tp_hidden", "cp_hidden", "ep_hidden", "pp_hidden", "dp_hidden")
    return {
        "compute": each.compute_forward + each.compute_input + each.compute_weight,
        "accumulate": each.accumulate,
        "recompute": each.recompute,
        "tp": each.tp_forward + each.tp_backward,
        **{name: getattr(each, name) for name in others},
    }


def per_microbatch(
    model: Model,
    hardware: Hardware,
    table: Table,
    blocks: Blocks,
    kinds: Kinds,
    parts: Array | Ints | int = 1,
) -> RankTimes:
    """Return the times of each kind of rank for one microbatch; a microbatch passes so many such kinds on a rank."""

    def summed(name: str, **counts: Array) -> Array:
        found: Array = np.zeros_like(kinds.dense)
        for layer, count in counts.items():
            each = getattr(getattr(blocks, layer), name)
            if each.any() and count.any():
                found += count * each[:, None]
        return found

    def over(name: str) -> Array:
        return summed(name, dense=kinds.dense, mixture=kinds.mixture, first=kinds.first, last=kinds.last)

    def again(name: str) -> Array:
        return summed(name, dense=kinds.full_dense, mixture=kinds.full_mixture)

    forward = over("forward")
    exposed, hidden = sharded_s(hardware, table, blocks, kinds)
    messages = (messages_s(model, hardware, table) / 2 / parts)[:, None] * np.ones_like(forward)
    weights, expert_weights = over("weights"), over("expert_weights")
    computed = over("backward_input") + over("backward_weight")
    exchange = over("ep")
    mixing = table.exchanges_beside
    sending = table.is_scheduled(*PAIRED) | table.is_scheduled("interleaved-1f1b") & (table.overlap > 0)
    rest = forward - exchange * mixing[:, None], computed - exchange * mixing[:, None]
    exchanged, exchange_hidden = beside_other_s(hardware, table, mixing, exchange, (forward, computed))
    sent, sent_hidden = beside_other_s(hardware, table, sending, messages, rest)
    return RankTimes(
        compute_forward=forward,
        compute_input=over("backward_input"),
        compute_weight=over("backward_weight"),
        accumulate=accumulated_s(hardware, table, weights, expert_weights),
        recompute=again("forward") + over("selective"),
        tp_forward=over("tp_forward"),
        tp_backward=over("tp_backward") + again("tp_forward"),
        tp_hidden=over("tp_hidden"),
        cp=over("cp_forward") + over("cp_backward") + again("cp_forward"),
        cp_hidden=over("cp_hidden"),
        ep=exchanged + again("ep"),
        ep_hidden=exchange_hidden,
        pp=sent,
        pp_hidden=sent_hidden,
        dp=exposed,
        dp_hidden=hidden,
        weights=weights,
        expert_weights=expert_weights,
    )


def beside_other_s(
    hardware: Hardware, table: Table, pairs: NDArray[np.bool_], wait: Array, computed: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return the communication of a microbatch, exposed and hidden: as long in its forward as in its backward.

    Where a forward is paired with another microbatch's backward, as in DualPipe, each one's exchange of tokens and its
    messages between stages run beside the other's computation (arXiv:2412.19437, section 3.2.1). Interleaved 1F1B sends
    beside it too (Megatron-LM, `overlap_p2p_comm`). Forwards that fill the pipeline, and backwards that drain it, have
    no partner.
    """
    share = (pairs * np.clip(1 - (table.pp - 1) / table.microbatches, 0.0, 1.0))[:, None]
    exposed, hidden = np.zeros_like(computed[0]), np.zeros_like(computed[0])
    for beside in computed:
        left, covered = overlap(wait, np.maximum(beside, 0.0), hardware)
        exposed = exposed + share * left + (1 - share) * wait
        hidden = hidden + share * covered
    return exposed, hidden


def accumulated_s(hardware: Hardware, table: Table, weights: Array, expert_weights: Array) -> Array:
    """Return the time of adding a microbatch's gradients to the sum so far: one is read, the other read and written.

    Where gradients are scattered after each microbatch, only a shard is added. DeepSpeed's pipeline makes a copy in the
    sum's precision first (`BF16_Optimizer._update_hp_grad`).
    """
    scatters = (table.zero >= 2) & (table.reduced_every == 1)
    summed = gradient_bytes(table)
    copied = 2 * summed * ((table.pp_duplex == 0) & (table.pp > 1) & (summed > widths(table)))
    each = ((widths(table) + 2 * summed + copied) * (table.fused_accumulation == 0))[:, None]
    return memory_s(each * _share(table, weights, expert_weights, scatters), hardware)


def _share(table: Table, weights: Array, expert_weights: Array, shards: NDArray[np.bool_]) -> Array:
    """Return the parameters that a rank works on, where its replicas shard them."""
    parts, expert_parts = (np.where(shards, ranks, 1)[:, None] for ranks in (table.sharing, table.dp * table.cp))
    return np.asarray(weights / parts + expert_weights / expert_parts)


def _of_one_way(each: RankTimes, ways: Array) -> RankTimes:
    """Return the times of a microbatch under bidirectional schedules: it passes one of a rank's two stages, so half."""
    whole = ("weights", "expert_weights")
    return replace(each, **{one.name: getattr(each, one.name) / ways for one in fields(each) if one.name not in whole})


def messages_s(model: Model, hardware: Hardware, table: Table) -> Array:
    """Return the wait of a rank for its neighbours' messages: two exchanges per chunk, each one in and one out at once.

    Links are full duplex, so an exchange takes as long as one message, if both are sent at once. The tp ranks hold the
    same activation and send a slice each. DeepSpeed's pipeline gathers the slices again: of the activation, of its
    gradient, and of the stage's own output (`PartitionedTensor.full` in its `pipe/engine.py`).
    """
    whole = table.microbatch * table.seq / table.cp * model.hidden * widths(table)
    stride = table.gpus // table.pp
    exchanges = np.where(table.pp_duplex > 0, 2.0, 4.0) * table.chunks
    gathered = np.where(table.pp_duplex > 0, 0.0, 3.0) * ring_s(whole, table.tp, 1 + 0 * table.tp, hardware)
    sent = exchanges * message_s(whole / table.tp, stride, hardware)
    return np.where(table.pp > 1, sent + gathered, 0.0)


def sharded_s(hardware: Hardware, table: Table, blocks: Blocks, kinds: Kinds) -> tuple[Array, Array]:
    """Return the gathers and reduce-scatters of ZeRO-2 and 3 in each microbatch: exposed and hidden.

    The next layer is gathered during computation, and a layer's gradients are scattered during the next backward.
    """
    width = widths(table)
    reduced = gradient_bytes(table)
    gathers = (table.zero == 3) * 1.0
    scatters = (table.zero >= 2) / table.reduced_every
    exposed, hidden = np.zeros_like(kinds.dense), np.zeros_like(kinds.dense)
    layers = (
        (blocks.dense, kinds.dense, True),
        (blocks.mixture, kinds.mixture, True),
        (blocks.first, kinds.first, False),
        (blocks.last, kinds.last, False),
    )
    if not scatters.any():
        return exposed, hidden
    for layer, count, overlaps in layers:
        if not count.any():
            continue
        gather = over_replicas_s(hardware, table, layer, width)
        scatter = over_replicas_s(hardware, table, layer, reduced)
        beside_forward = layer.forward * overlaps
        beside_backward = (layer.backward_input + layer.backward_weight) * overlaps
        forward = overlap(gathers * gather, beside_forward, hardware)
        backward = overlap(gathers * gather + scatters * scatter, beside_backward, hardware)
        exposed = exposed + count * (forward[0] + backward[0])[:, None]
        hidden = hidden + count * (forward[1] + backward[1])[:, None]
    return exposed, hidden


def over_replicas_s(hardware: Hardware, table: Table, part: Layer | RankTimes, size: Array) -> Array:
    """Return the time of one ring pass over the replicas with the weights of a part, `size` bytes for each of them.

    Experts have fewer replicas, which are further apart.
    """
    shape = (-1, *(1 for _ in part.weights.shape[1:]))
    tp, ep, outer = (column.reshape(shape) for column in (table.tp, table.ep, table.dp * table.cp))
    found: Array = np.zeros_like(part.weights)
    for weights, replicas, stride in ((part.weights, outer * ep, tp), (part.expert_weights, outer, tp * ep)):
        if weights.any():  # where there are none, no message is sent
            found += np.where(weights * size > 0, ring_s(weights * size, replicas, stride, hardware), 0.0)
    return found


def reduce_s(hardware: Hardware, table: Table, each: RankTimes) -> tuple[Array, Array]:
    """Return the times of gradient reduction after the backwards, and of weight gathers after the step (ZeRO-1, 2)."""
    zero, summed = table.zero, gradient_bytes(table)
    added = np.where(zero == 0, 2 * summed, np.where(zero == 1, summed, 0.0))
    gathered = np.where((zero == 1) | (zero == 2), widths(table), 0.0)
    found, again = (over_replicas_s(hardware, table, each, one[:, None]) for one in (added, gathered))
    return found, again


def beside_passes(
    hardware: Hardware,
    table: Table,
    each: RankTimes,
    kinds: Kinds,
    reduction: Array,
    gathering: Array,
    of_ends: Array | None = None,
    ways: Ints | int = 1,
) -> tuple[Array, Array]:
    """Return what remains of reductions after a stage's last backward, and of gathers before its first forward.

    A layer's gradients are reduced while the backward of the layer before it runs, and its weights are gathered while
    that layer's forward runs; of the stage that a rank runs first, nothing of the first layer is hidden, and later
    stages have the forwards of a round of microbatches besides:

        backward of the last microbatch   ▕ layer 3 ▏▕ layer 2 ▏▕ layer 1 ▏
        reductions                                   ▕ 3 ▏▕    2    ▏▕  1  ▏    the part after the backward

    Each column of `each` stands for a rank's chunks, or `ways` twins, with `of_ends` as the gathers of embedding and
    head, (n, 2); None: for one stage, which after the first round only waits its turn.
    """
    alone = of_ends is None
    chunks = np.ones((len(table), 1)) if alone else table.chunks[:, None]
    own, twins = chunks * np.reshape(ways, (-1, 1)), np.reshape(ways, (-1, 1)) > 1
    inner = 1 - 1 / np.maximum((kinds.dense + kinds.mixture) / own, 1.0)
    overlaps = (table.overlap > 0)[:, None]
    forward = each.compute_forward / chunks

    def left(communication: Array, computation: Array) -> Array:
        """Return the rest of a stage's communication beside its computation, layer by layer."""
        beside: Array = np.minimum(communication, computation) * inner * overlaps
        return communication - beside * (1 - hardware.constants.contention)

    def later(communication: Array) -> Array:
        """Return the rest of gathers of a stage that is not its rank's first; twins both begin a way."""
        rest = np.where(overlaps, np.maximum(communication - table.pp[:, None] * forward, 0.0), communication)
        return np.where(twins, left(communication, forward), rest)

    if of_ends is None:
        is_first = kinds.rank < table.pp[:, None]
        reduced = np.where(is_first, left(reduction, each.compute_input + each.backward_weight), reduction)
        return reduced, np.where(is_first, left(gathering, forward), later(gathering))
    of_stage = reduction / own
    reduced = reduction - of_stage + left(of_stage, (each.compute_input + each.backward_weight) / chunks)
    first, last = kinds.first * of_ends[:, :1], kinds.last * of_ends[:, 1:]
    of_stage, behind = (gathering - first - last) / own, (own > 1) * kinds.last
    gathered = left(of_stage + first + (own == 1) * last, forward) + behind * later(of_stage + last)
    return reduced, gathered + (own - 1 - behind) * later(of_stage)


def optimizer_s(hardware: Hardware, table: Table, each: RankTimes) -> Array:
    """Return the time of the optimizer step, bound by memory; ZeRO divides it over the replicas.

    Gradients are divided before they are reduced, and cleared where they stay resident.
    """
    numbers = _share(table, each.weights, each.expert_weights, table.zero > 0)
    if hardware.measured.optimizer is not None:
        around = (STEP_BYTES - ADAM_BYTES) * numbers
        stepped = numbers / curve_rate(hardware.measured.optimizer, numbers)
        return stepped + around / memory_rate(around, hardware)
    whole = DIVIDE_BYTES + CLEAR_BYTES * (table.zero <= 1)[:, None]
    moved = whole * (each.weights + each.expert_weights) + (STEP_BYTES - whole) * numbers
    return moved / memory_rate(moved, hardware)


def stage_times(model: Model, hardware: Hardware, table: Table, blocks: Blocks, stages: Kinds) -> StageTimes:
    """Return the times of each stage for a microbatch and at the end of a step; `stages` has stages as kinds."""
    each = per_microbatch(model, hardware, table, blocks, stages, table.chunks)
    reduction, gathering = reduce_s(hardware, table, each)
    stepping = optimizer_s(hardware, table, each)
    if shares_cores(hardware):
        each = in_step(each, table, hardware)
        reduction, gathering = (reduced_s(part, table, hardware) for part in (reduction, gathering))
        stepping = stepped_s(stepping, table, hardware)
    else:
        reduction, gathering = beside_passes(hardware, table, each, stages, reduction, gathering)
    return StageTimes(each, reduction, gathering, stepping)
