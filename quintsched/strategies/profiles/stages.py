"""What each stage of a layout takes: computation of a microbatch, exchanges with its neighbours, the end of the step.

    forward      operators, and the collectives inside them
    backward     the same, weights' gradients, adding them up, and forwards that were recomputed
    exchange     activations of one microbatch one way, gradients of another back; across nodes or not
    end          gradients over replicas, tied embeddings, the optimizer

All times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from quintsched.strategies.profiles.layout import Layout, Placed, Stage
from quintsched.strategies.profiles.profile import Operator
from quintsched.strategies.profiles.rates import Rates

REDUCTION_PASSES = 6.0
"""How often gradients pass through memory around their reduction: gathered, divided and scattered, read and written."""
OPTIMIZER_PASSES = 32.0
"""How often, in units of the weights' bytes of 2 each: gradients to fp32 (3), unscaled (4), their norm and clipping
(6), counting zeros (2), Adam (14), weights copied back (3)."""


@dataclass(frozen=True)
class StageTime:
    """One stage: seconds for one microbatch."""

    forward_s: float
    backward_s: float
    """All of it: with what is recomputed and what is accumulated."""
    recompute_s: float
    accumulate_s: float
    communication_s: float
    """Of forward and backward, collectives of tensor parallelism; recomputed ones too."""
    weights: float
    """Bytes, on one GPU."""


@dataclass(frozen=True)
class Exchange:
    """What passes between two neighbouring stages: seconds."""

    forward_s: float
    """Activations, one way."""
    backward_s: float
    """Gradients, the other way."""
    both_s: float
    """Of both at once: they share the way through the host."""


def stage_time(rates: Rates, layout: Layout, stage: Stage) -> StageTime:
    """Return what a stage takes for one microbatch."""
    forward = backward = again = communication = weights = 0.0
    for placed in stage.operators:
        operator, timed = found(rates, layout, placed), rates.timed(*_key(layout, placed))
        summed = [
            rates.collective_s("all_reduce", placed.tp, size)
            for size in (operator.all_reduce_forward, operator.all_reduce_backward)
        ]
        forward += timed.forward_s
        backward += timed.backward_s
        again += timed.forward_s * placed.recompute
        communication += summed[0] * (1 + placed.recompute) + summed[1]
        weights += operator.weights
    to_forward, to_backward = _reshard_s(rates, layout, stage)
    accumulate = _accumulate_s(rates, layout, stage)
    return StageTime(
        forward + to_forward,
        backward + to_backward + again + accumulate,
        again,
        accumulate,
        communication + to_forward + to_backward,
        weights,
    )


def exchange(rates: Rates, layout: Layout, left: int) -> Exchange:
    """Return what passes between the stage `left` and the next one.

    A tensor that all GPUs of a stage have alike is sent in parts, one by each of them, and gathered behind the
    message. Inside a node a GPU's parts share its way; between nodes each pair of GPUs has its own connection.
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
    return Exchange(message + gathers[0], message + gathers[1], 2 * message + max(gathers))


def tied_s(rates: Rates, layout: Layout) -> float:
    """Return the seconds of adding up the embedding's gradients of the first stage and of the head."""
    if len(layout.stages) == 1 or not rates.profile.first:
        return 0.0
    size = found(rates, layout, layout.stages[-1].operators[-1]).weights
    return 2 * rates.message_s(size, network=layout.crosses(0, len(layout.stages) - 1))


def end_s(rates: Rates, layout: Layout, stage: Stage, weights: float) -> float:
    """Return the seconds of what a stage does once all its gradients are there, tied embeddings left out."""
    replicas = max(placed.dp for placed in stage.operators)
    reduction = rates.collective_s("all_reduce", replicas, weights)
    if stage.gpus > layout.gpus_per_node and replicas > 1:
        reduction = 2 * (replicas - 1) / replicas * rates.message_s(weights, network=True)
    return rates.pass_s((REDUCTION_PASSES + OPTIMIZER_PASSES) * weights) + reduction


def found(rates: Rates, layout: Layout, placed: Placed) -> Operator:
    """Return the profile's operator for one of a layout."""
    return rates.find(*_key(layout, placed))


def _key(layout: Layout, placed: Placed) -> tuple[str, int, int, int]:
    return placed.name, placed.tp, max(layout.microbatch // placed.dp, 1), placed.cut


def _accumulate_s(rates: Rates, layout: Layout, stage: Stage) -> float:
    """Return the seconds of adding a microbatch's gradients to the sum; the first microbatch has none to add to."""
    first = set(rates.profile.first)
    moved = sum(found(rates, layout, placed).weights for placed in stage.operators if placed.name not in first)
    added = (layout.microbatches - 1) / layout.microbatches
    return rates.pass_s(moved * rates.profile.accumulation_bytes * added)


def _reshard_s(rates: Rates, layout: Layout, stage: Stage) -> tuple[float, float]:
    """Return the seconds of gathering, forward and backward, where neighbours on a stage are cut differently."""
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
