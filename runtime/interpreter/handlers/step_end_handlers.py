"""Handlers that end a step: tied gradients, reductions over replicas, metrics, the global norm, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quintsched.ir import instruction_set as ins

from ...comm.overlap_threads import BoundCall
from ...weights_and_gradients.grad_buckets import PlanBucket
from ...weights_and_gradients.grad_norm import CLIP_EPSILON, clip_factor
from ..instruction_state import StepEndState
from ..step_losses.sum_losses_across_ranks import DOUBT, NUM_ASKED, NUM_LOSSES


def bind_sync_tied(state: StepEndState, index: int, instruction: ins.SyncTied) -> BoundCall:
    """Start to sum the gradients of weights that several stages hold: a tied weight, or all weights of twin stages."""
    return partial(state.gradients.reducer.add_tied, instruction.params, instruction.stages)


def bind_reduce_bucket(
    state: StepEndState, index: int, instruction: ins.AllReduceBucket | ins.ReduceScatterBucket
) -> BoundCall:
    """Launch the rest of a bucket's reduction: an all-reduce, or a reduce-scatter to each replica's shard."""
    return partial(state.gradients.reducer.reduce, PlanBucket(instruction.stage, instruction.bucket))


def bind_share_metrics(state: StepEndState, index: int, instruction: ins.ShareMetrics) -> BoundCall:
    """Start an all-reduce of the tally over all axes but tp, unless it is piggybacked on gradients."""
    return partial(state.tally.reduce, state.metrics_group)


class ClipHalves(NamedTuple):
    """`ClipGrad` in two: work of the device alone, then work of the host, which reads the figures.

    Attributes:
        measure: divides the gradients by loss weight x loss scale; returns their squared global norm, the number of
            parameters that may lack a gradient, the stop requests and doubts (`DOUBT`), and data digests: (3 + n,),
            float64.
        clip: reads these figures: checks digests and doubts, updates the loss scale, and clips to the maximum norm.
    """

    measure: Callable[[], Tensor]
    clip: Callable[[Tensor], None]


def halves_of_clip(state: StepEndState, index: int) -> ClipHalves:
    """Return the halves of the `ClipGrad` at `index`, for a step that does not accumulate gradients further."""
    reducer, norm, tally = state.gradients.reducer, state.gradients.norm, state.tally
    max_norm, outcome = state.clip, state.outcome
    absent, scale, earlier = state.gradients.absent, state.scale, state.earlier
    wait, digests, device = state.waits.waiter(index), state.data_digests, state.metrics_group.device
    norm_of = partial(torch.full, (), dtype=torch.float64, device=device)

    def measure() -> Tensor:
        reducer.complete(wait)
        weight = tally.weight(wait, earlier)
        earlier.clear()
        total = weight * scale.value if scale.value != 1 else weight
        figures, work = norm.divide(total, absent.suspects(), tally.figures.rest[NUM_ASKED], row=digests.take_row())
        wait([work])
        return figures

    def clip(figures: Tensor) -> None:
        square, suspects, asked, *sums = norm.read(figures)
        length = math.sqrt(square)
        outcome.norm = partial(norm_of, length)
        if sums != digests.equal:
            digests.require_equal(sums)
        if asked >= DOUBT:
            state.settle_loss(accumulates=reducer.accumulates, again=True)
        outcome.stop_asked, outcome.skipped = asked % DOUBT > 0, not math.isfinite(length)
        outcome.empty = outcome.skipped and not tally.figures.rest[NUM_LOSSES]
        if scale.scales and not outcome.empty:
            scale.update(skipped=outcome.skipped)
        if suspects and not outcome.skipped:
            absent.find()
        if max_norm is not None and max_norm < length + CLIP_EPSILON and not outcome.skipped:
            norm.clip(outcome.norm(), max_norm)

    return ClipHalves(measure, clip)


def bind_clip_grad(state: StepEndState, index: int, instruction: ins.ClipGrad) -> BoundCall:
    """Divide the gradients by the batch's weight, compute their global norm, and clip them; or accumulate."""
    reducer, tally, earlier = state.gradients.reducer, state.tally, state.earlier
    wait, (measure, clip) = state.waits.waiter(index), halves_of_clip(state, index)

    def run() -> None:
        state.settle_loss(accumulates=reducer.accumulates)
        if reducer.accumulates:
            reducer.hold(wait)
            earlier.append(tally.figures)
        else:
            clip(measure())

    return run


def bind_opt_step(state: StepEndState, index: int, instruction: ins.OptStep) -> BoundCall:
    """Step the optimizer of these stages, if the gradient is finite, and clear their gradients; or accumulate."""
    stepper, stages = state.steppers.get(instruction.stages), instruction.stages
    reducer, masters, outcome = state.gradients.reducer, state.masters, state.outcome
    absent, clip, buckets = state.gradients.absent, state.clip, reducer.of_stages(stages)
    goes_by_norm = stepper is not None and stepper.goes_by_norm

    def norm() -> Tensor | None:
        found = outcome.norm and outcome.norm()
        return found if clip is None or found is None else found * clip_factor(found, clip)

    def run() -> None:
        if reducer.accumulates:
            return
        if stepper is not None and not outcome.skipped:
            if absent.found:
                absent.take_away(stages)
            stepper.step_weights(norm() if goes_by_norm else None)
            masters.publish(stages)
        for bucket in buckets:
            bucket.clear(afresh=outcome.skipped)

    return run
