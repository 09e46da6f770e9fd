"""Times of each stage of a layout: computation of a microbatch, exchanges with its neighbours, end of the step.

    forward      operators, and the collectives inside them
    backward     the same, weight gradients, gradient accumulation, and recomputed forwards
    exchange     activations of one microbatch one way, gradients of another back; across nodes or not
    end          gradient reduction over replicas, tied embeddings, the optimizer

All times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from quintsched.strategies.profiles.operator_layout import OperatorLayout, Placed, StageOperators
from quintsched.strategies.profiles.operator_rates import Rates
from quintsched.strategies.profiles.profile import Operator

REDUCTION_PASSES = 6.0
"""Memory passes over gradients around their reduction: gathered, divided and scattered, each read and written."""
OPTIMIZER_PASSES = 32.0
"""Memory passes of the optimizer, in units of the weights' bytes of 2 each: gradients to fp32 (3), unscaled (4), norm
and clipping (6), counting zeros (2), Adam (14), weights copied back (3)."""


@dataclass(frozen=True)
class StageTime:
    """Times of one stage for one microbatch, in seconds."""

    forward_s: float
    backward_s: float
    """Whole backward: with recomputation and gradient accumulation."""
    recompute_s: float
    """Recomputed forwards, without the collectives inside them."""
    accumulate_s: float
    communication_s: float
    """Collectives of tensor parallelism in forward and backward, recomputed ones included."""
    weights: float
    """Bytes of the weights on one GPU."""


@dataclass(frozen=True)
class Exchange:
    """Times of the exchanges between two neighbouring stages, in seconds."""

    forward_s: float
    """Activations only, one direction."""
    backward_s: float
    """Gradients only, the other direction."""
    both_s: float
    """Both at once: between nodes, where links are full duplex, one message; inside a node the time of two, as they
    share the path through the host's memory."""


def stage_time(rates: Rates, layout: OperatorLayout, stage: StageOperators) -> StageTime:
    """Return the times of a stage for one microbatch."""
    forward = backward = rerun = again = communication = weights = 0.0
    for placed in stage.operators:
        operator, timed = found(rates, layout, placed), rates.timed(*_key(layout, placed))
        summed = [
            min(took, rates.collective_s("all_reduce", placed.tp, size))  # it may be faster inside than by itself
            for took, size in (
                (timed.forward_s, operator.all_reduce_forward),
                (timed.backward_s, operator.all_reduce_backward),
            )
        ]
        forward += timed.forward_s
        backward += timed.backward_s
        rerun += timed.forward_s * placed.recompute
        communication += summed[0] * (1 + placed.recompute) + summed[1]
        again += (timed.forward_s - summed[0]) * placed.recompute
        weights += operator.weights
    to_forward, to_backward = _reshard_s(rates, layout, stage)
    accumulate = _accumulate_s(rates, layout, stage)
    return StageTime(
        forward + to_forward,
        backward + to_backward + rerun + accumulate,
        again,
        accumulate,
        communication + to_forward + to_backward,
        weights,
    )


def exchange(rates: Rates, layout: OperatorLayout, left: int) -> Exchange:
    """Return the exchanges between the stage `left` and the next one.

    A tensor that is replicated on all GPUs of a stage is sent in parts, one by each GPU, and gathered after the
    message. Inside a node a GPU's parts share its link; between nodes each pair of GPUs has its own connection.
    """
    ends = layout.stages[left].operators[-1], layout.stages[left + 1].operators[0]
    last = found(rates, layout, ends[0])
    handed, whole = (last.output + last.passed) * ends[0].tp, last.whole
    handed -= whole * (ends[0].tp - 1)
    degrees = [placed.tp * placed.dp for placed in ends]
    network = layout.crosses(left, left + 1)
    size = handed * ends[0].dp / (max(degrees) if network else min(degrees))
    message = rates.message_s(size, network=network)
    gathers = [rates.collective_s("all_gather", p.tp, whole * ends[0].dp / p.dp / p.tp) for p in reversed(ends)]
    return Exchange(message + gathers[0], message + gathers[1], message * (1 if network else 2) + max(gathers))


def tied_s(rates: Rates, layout: OperatorLayout) -> float:
    """Return the seconds of summing the tied embedding's gradients between the first stage and the head."""
    if len(layout.stages) == 1 or not rates.profile.first:
        return 0.0
    size = found(rates, layout, layout.stages[-1].operators[-1]).weights
    return 2 * rates.message_s(size, network=layout.crosses(0, len(layout.stages) - 1))


def end_s(rates: Rates, layout: OperatorLayout, stage: StageOperators, weights: float) -> float:
    """Return the seconds of a stage's work after its last backward, without tied embeddings."""
    replicas = max(placed.dp for placed in stage.operators)
    reduction = rates.collective_s("all_reduce", replicas, weights)
    if stage.gpus > layout.gpus_per_node and replicas > 1:
        reduction = 2 * (replicas - 1) / replicas * rates.message_s(weights, network=True)
    return rates.pass_s((REDUCTION_PASSES + OPTIMIZER_PASSES) * weights) + reduction


def found(rates: Rates, layout: OperatorLayout, placed: Placed) -> Operator:
    """Return the profile's operator for an operator of the layout."""
    return rates.find(*_key(layout, placed))


def _key(layout: OperatorLayout, placed: Placed) -> tuple[str, int, int, int]:
    return placed.name, placed.tp, max(layout.microbatch // placed.dp, 1), placed.cut


def _accumulate_s(rates: Rates, layout: OperatorLayout, stage: StageOperators) -> float:
    """Return the seconds of gradient accumulation per microbatch; the first microbatch needs none."""
    first = set(rates.profile.first)
    moved = sum(found(rates, layout, placed).weights for placed in stage.operators if placed.name not in first)
    added = (layout.microbatches - 1) / layout.microbatches
    return rates.pass_s(moved * rates.profile.accumulation_bytes * added)


def _reshard_s(rates: Rates, layout: OperatorLayout, stage: StageOperators) -> tuple[float, float]:
    """Return the seconds of gathering, forward and backward, between neighbours on a stage that are cut differently."""
    forward = backward = 0.0
    for before, after in pairwise(stage.operators):
        left, right = found(rates, layout, before), found(rates, layout, after)
        if (left.leaves, right.enters) == ("cut", "whole"):
            forward += rates.collective_s("all_gather", after.tp, left.output)
        if (left.leaves, right.enters) == ("whole", "cut"):
            backward += rates.collective_s("all_gather", after.tp, right.input / after.tp)
        if after.dp > before.dp:
            backward += rates.collective_s("all_gather", after.dp // before.dp, right.input)
        if after.dp < before.dp:
            forward += rates.collective_s("all_gather", before.dp // after.dp, left.output)
    return forward, backward
