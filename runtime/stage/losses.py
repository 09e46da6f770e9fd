"""Losses on stages before the last: a block that takes `targets` finds its own, and returns it beside its output.

    class Exit(nn.Module):
        def forward(self, x, targets):    return x, cross_entropy(self.head(x), targets, reduction="sum")

The plan names the stages that have such blocks (`compile --losses 1,3`), so that its proof knows of their losses, and
their ranks are given targets (`engine.needs_targets`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quintsched.errors import MisfitError
from quintsched.ir.layout import Layout

from ..blocks.blocks import Parcel, takes_targets
from ..parallel.tensor.sequence import SequenceParallel


def target_stages(
    cuts: Sequence[range], blocks: Sequence[nn.Module], layout: Layout, tokens: SequenceParallel
) -> set[int]:
    """Return the stages whose blocks take targets.

    Raises `MisfitError` where the plan has no loss on one of them, and for blocks that are given slices of the tokens.
    """
    taking = [number for number, block in enumerate(blocks) if takes_targets(block)]
    stages = [stage for stage, numbers in enumerate(cuts) if any(number in numbers for number in taking)]
    has_loss = {*layout.losses, *(route.stages[-1] for route in layout.routes)}
    for stage in stages:
        if stage not in has_loss:
            wanted = ",".join(map(str, sorted({*stages, *has_loss}, key=layout.routes[0].stages.index)))
            raise MisfitError(
                f"a block of stage {stage} takes targets, but the plan has no loss there: compile it with --losses "
                f"{wanted}"
            )
    for number in taking:
        if tokens.inside(number):
            raise MisfitError(
                f"block {number} takes targets, and sequence parallelism gives it a slice of the tokens; run without "
                "sequence_parallel"
            )
    return {*stages}


def require_planned_losses(layout: Layout, cuts: Sequence[range], parcels: Sequence[Parcel]) -> None:
    """Raise `MisfitError` where the plan has a loss on a stage before the last, and none of its blocks returns one."""
    for stage in layout.losses[:-1]:
        if not any(parcels[number].has_loss for number in cuts[stage]):
            raise MisfitError(
                f"the plan has a loss on stage {stage}, but none of its {len(cuts[stage])} blocks returns one"
            )
