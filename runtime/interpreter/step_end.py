"""What ends a step: tied gradients, reductions over replicas, metrics, the global norm, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from quintsched.ir import instructions as ins

from .rank_state import Machine

Call = Callable[[], None]


def bind_sync_tied(machine: Machine, index: int, instruction: ins.SyncTied) -> Call:
    """Add up the gradients of what several stages hold."""
    assert machine.gradients is not None
    return partial(machine.gradients.add_up, instruction.params, instruction.stages)


def bind_reduce_bucket(
    machine: Machine, index: int, instruction: ins.AllReduceBucket | ins.ReduceScatterBucket
) -> Call:
    """Launch what is left of a bucket's reduction, whole or to a share for everybody."""
    assert machine.gradients is not None
    return partial(machine.gradients.reduce, (instruction.stage, instruction.bucket))


def bind_share_metrics(machine: Machine, index: int, instruction: ins.ShareMetrics) -> Call:
    """Sum the tally over all ranks but tensor-parallel copies, without waiting for it."""

    def run() -> None:
        machine.sums = machine.tally.sums()
        machine.shared = machine.groups.metrics.all_reduce(machine.sums)

    return run


def bind_clip_grad(machine: Machine, index: int, instruction: ins.ClipGrad) -> Call:
    """Make the gradients those of the batch, find their global norm, and scale them under the threshold."""
    gradients, clip = machine.gradients, machine.clip
    assert gradients is not None
    wait = partial(machine.wait, index=index)

    def run() -> None:
        gradients.complete(wait)
        gradients.finish(machine.weight(index))
        norm, work = gradients.global_norm()
        machine.wait([work], index)
        machine.norm = norm.sqrt_()
        machine.skipped = not math.isfinite(norm.item())
        if clip is not None and not machine.skipped:
            gradients.scale(torch.clamp(clip / (norm + 1e-6), max=1.0))

    return run


def bind_opt_step(machine: Machine, index: int, instruction: ins.OptStep) -> Call:
    """Step the optimizer of these stages, unless the gradient is not finite; then clear their gradients."""
    optimizer = machine.optimizers.get(instruction.stages)
    gradients, masters = machine.gradients, machine.masters
    assert gradients is not None
    assert masters is not None

    def run() -> None:
        if optimizer is not None and not machine.skipped:
            optimizer.step()
            masters.publish(instruction.stages)
        gradients.clear(instruction.stages)

    return run
