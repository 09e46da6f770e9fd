"""What ends a step: metrics for everyone, the global gradient norm, the optimizer.

The metrics come first: they carry the batch's total loss weight, by which every rank divides its gradients.
"""

from __future__ import annotations

from dataclasses import replace

from quintsched.instructions import ClipGrad, OptStep, ShareMetrics
from quintsched.plan import Plan


def share_metrics(plan: Plan) -> Plan:
    """End every program with `ShareMetrics`."""
    return replace(plan, programs=tuple((*program, ShareMetrics()) for program in plan.programs))


def clip_gradients(plan: Plan) -> Plan:
    """End every program with `ClipGrad`."""
    return replace(plan, programs=tuple((*program, ClipGrad()) for program in plan.programs))


def step_optimizer(plan: Plan) -> Plan:
    """End every program with the `OptStep` of all its stages."""
    steps = (OptStep(plan.layout.stages_of(rank)) for rank in range(len(plan.programs)))
    return replace(plan, programs=tuple((*p, step) for p, step in zip(plan.programs, steps, strict=True)))
