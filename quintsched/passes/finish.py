"""What ends a step: metrics for everyone, the global gradient norm, the optimizer.

The metrics come first: they carry the batch's total loss weight, by which every rank divides its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quintsched.ir.instructions import AllGatherBucket, ClipGrad, OptStep, ShareMetrics
from quintsched.plan import Plan


def share_metrics(plan: Plan) -> Plan:
    """End every program with `ShareMetrics`."""
    return replace(plan, programs=tuple((*program, ShareMetrics()) for program in plan.programs))


def clip_gradients(plan: Plan) -> Plan:
    """End every program with `ClipGrad`."""
    return replace(plan, programs=tuple((*program, ClipGrad()) for program in plan.programs))


def step_optimizer(plan: Plan) -> Plan:
    """End every program with the `OptStep` of all its stages.

    Where replicas step shares of weights that stand on all of them, an `AllGatherBucket` per stage and bucket follows.
    """
    held = [plan.layout.stages_of(rank) for rank in range(len(plan.programs))]
    return replace(
        plan,
        programs=tuple(
            (*program, OptStep(stages), *_gathers(stages, plan))
            for program, stages in zip(plan.programs, held, strict=True)
        ),
    )


def _gathers(stages: tuple[int, ...], plan: Plan) -> Iterator[AllGatherBucket]:
    if plan.zero.shares_optimizer and not plan.zero.shares_weights:
        for stage in stages:
            yield from (AllGatherBucket(stage, bucket, axes) for bucket, axes in plan.layout.reductions)
