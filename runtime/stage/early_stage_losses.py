"""Losses on stages before the last: a block that takes `targets` computes a loss, and returns it beside its output.

    class Exit(nn.Module):
        def forward(self, x, targets):    return x, cross_entropy(self.head(x), targets, reduction="sum")

The plan names the stages with such blocks (`compile --losses 1,3`), so that its proof includes their losses, and
their ranks get targets (`engine.needs_targets`).

A loss that reads neighbouring tokens cannot run on slices of sequences. Its `prepare` transforms whole targets so that
each token has all it needs, and its `prepared` is the loss for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from quintsched.errors import MisfitError
from quintsched.ir.layout import Layout
from quintsched.plan import Plan

from ..blocks.block_builders import Parcel, takes_targets

_BEGUN = (
    "block {} ({}) returns a loss beside its output, and returned none in the first step, before which it is settled "
    "what losses of blocks are and weigh; return (output, output.new_zeros(())) from the start, while there is none"
)


def target_stages(cuts: Sequence[range], blocks: Sequence[nn.Module]) -> set[int]:
    """Return the stages whose blocks take targets."""
    taking = {number for number, block in enumerate(blocks) if takes_targets(block)}
    return {stage for stage, numbers in enumerate(cuts) if taking.intersection(numbers)}


def require_planned_losses(layout: Layout, cuts: Sequence[range], parcels: Sequence[Parcel]) -> None:
    """Raise `MisfitError` where the plan has a loss on a stage before the last, but no block of it returns one."""
    for stage in layout.losses[:-1]:
        if not any(parcels[number].has_loss for number in cuts[stage]):
            raise MisfitError(
                f"the plan has a loss on stage {stage}, but none of its {len(cuts[stage])} blocks returns one"
            )


class FirstLosses:
    """The blocks that return losses in the first step of a mode: weights and examinations are based on these.

    Args:
        is_meant: whether the loss of each microbatch is meant, so that later losses are allowed.

    Attributes:
        refusal: a block that has begun to return a loss since, in words; "": none.
    """

    def __init__(self, *, is_meant: bool) -> None:
        self._first, self._is_meant = dict[str, set[int]](), is_meant
        self.refusal = ""

    def expect(self, mode: str, parcels: Sequence[Parcel]) -> None:
        """Record which blocks return losses in the first step of a mode."""
        self._first[mode] = {number for number, parcel in enumerate(parcels) if parcel.has_loss}

    def require_first(self, mode: str, number: int, block: nn.Module) -> None:
        """Check that a block that returns a loss did so in the first step."""
        if number not in self._first[mode] and not self._is_meant:
            self.refusal = _BEGUN.format(number, type(block).__name__)


def for_slices(plan: Plan, loss_fn: Callable[..., Any]) -> tuple[Callable[[Any], Any] | None, Callable[..., Any]]:
    """Return the function that prepares targets before they are cut (None: none), and the loss for its results."""
    prepare = getattr(loss_fn, "prepare", None)
    if prepare is None or not cuts_sequences(plan):
        return None, loss_fn
    return prepare, loss_fn.prepared  # type: ignore[attr-defined]


def cuts_sequences(plan: Plan) -> bool:
    """Whether a unit has only a part of its sequences."""
    return plan.schedule.slices > 1 or plan.mesh.axis_size("cp") > 1
