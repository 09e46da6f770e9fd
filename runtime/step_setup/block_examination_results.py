"""Findings about the blocks of a run that examinations make: reductions of losses, backwards that are not linear.

The engine passes in who makes them (`examine.block_examinations`); a run that does not train has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from ..blocks.block_builders import Parcel
from ..losses.loss_reductions import LossWeight, Over
from ..losses.weighted_losses import SUMS
from ..parallel.cut_proofs.trial_inputs import FirstUnits

GatheredWeights = Callable[[int], AbstractContextManager[None]]
"""Function (stage) → context in which the weights of the stage are resident."""

NO_BLOCK_LOSS = (
    "{} gives a loss beside its output, and of microbatches it is not that of the batch: {}; return {} over "
    'samples of what each of them has by itself, such as F.cross_entropy(…, reduction="none").{}()'
)


class BlockLoss(NamedTuple):
    """Finding about the loss of a kind of block.

    Attributes:
        number: of the first block of the kind.
        kind: its class.
        over: all reductions that fit; empty: neither a sum nor a mean, as far as known.
        why: the reason why it is not known; "": it could be run.
        where: the condition under which it is neither, if that is not its usual input.
    """

    number: int
    kind: str
    over: tuple[LossWeight, ...]
    why: str = ""
    where: str = ""

    @property
    def name(self) -> str:
        """Name of the first block of the kind."""
        return f"block {self.number} ({self.kind})"


class Unlinear(NamedTuple):
    """Reason why the backward of a block is not linear, in words; "": it is linear.

    `adds`: linear except for a constant that it adds. `is_of_each`: each sample has the gradient that it has alone.
    """

    why: str = ""
    adds: bool = False
    is_of_each: bool = False


class BlockFindings:
    """Findings about the blocks of a run, before its first step and after changes: none, unless blocks are examined.

    Attributes:
        changed: the numbers of the blocks whose backwards may have changed since they were examined.
        losses: the findings about losses of blocks, of all ranks: the same on all ranks.
        in_evaluations: the same for eval mode.
        since: name of the state that was changed from outside and may influence the losses; "": none.
        unlinear: a block of this rank whose backward is not linear.
    """

    def __init__(self) -> None:
        self.changed: list[int] = []
        self.losses, self.in_evaluations = list[BlockLoss](), list[BlockLoss]()
        self.since, self.unlinear = "", Unlinear()

    def examine_backwards(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Find the blocks whose backward is not linear in its gradients (collective over ranks with the same blocks).

        Args:
            units: the first microbatch.
            parcels: the outputs of each block for one unit.
            gathered: context that makes the weights of a stage resident.
        """

    def examine_losses(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Determine the reductions of losses of blocks that are not built in (collective); see `examine_backwards`.

        Raises `MisfitError` for extras that blocks use for all samples alike, and that are cut with these.
        """

    def follow_units(self, units: FirstUnits, parcels: Sequence[Parcel]) -> None:
        """Schedule blocks for a new examination that receive extras of a tree or plain value not seen before."""

    def expect_evaluation(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Store the first units of evaluations, for `examine_evaluation`; see `examine_backwards`."""

    def examine_evaluation(self) -> bool:
        """Determine the reductions of losses in eval mode, if state may have changed since (collective).

        Returns whether they were examined. The blocks have to be in eval mode.
        """
        return False

    def examine_changed(self) -> None:
        """Examine the backwards of blocks that have changed on any rank (collective)."""

    def examine_again(self) -> None:
        """Examine the losses again (collective); the full set of experiments runs ever more rarely."""

    def begin_step(self) -> None:
        """Begin a step: check whether state that the blocks' code reads was changed from outside."""

    def end_step(self) -> None:
        """End a step: state that forwards changed themselves counts as their own from now on, and triggers nothing."""

    def over_targets(self) -> list[LossWeight]:
        """Return the reductions of losses that are means over other units than samples."""
        of_samples = (Over.SUM, Over.SAMPLES)
        kinds = [
            one.over
            for one in (*self.losses, *self.in_evaluations)
            if one.over and not any(w.over in of_samples for w in one.over)
        ]
        return [over[0] for over in kinds]

    def why_wrong(self, rule: LossWeight | None, *, evaluates: bool = False) -> str:
        """Return the reason why a loss of a block does not fit the loss function's reduction; "": all fit.

        In evaluations, a block's mean must have the reduction found in training too, by which it is weighted.
        """
        if rule is None or rule.over is Over.MICROBATCH:
            return ""
        wants_sum, where = rule.over in SUMS, "in evaluations, " if evaluates else ""
        trained = {one.name: one.over for one in self.losses} if evaluates else {}
        for one in self.in_evaluations if evaluates else self.losses:
            over = trained.get(one.name, one.over)
            fits = [w for w in one.over if (w.over is Over.SUM) == wants_sum and w in over]
            if not fits:
                what = f"it is neither a sum over samples nor a mean over them{one.where}"
                if one.over:
                    its = (
                        f"in training it is {over[0]}"
                        if over != one.over and over
                        else f"the loss function gives {rule}"
                    )
                    what = f"it is {one.over[0]}, and {its}"
                kind = "sum" if wants_sum else "mean"
                return where + NO_BLOCK_LOSS.format(one.name, one.why or what, f"a {kind}", kind)
        return ""
