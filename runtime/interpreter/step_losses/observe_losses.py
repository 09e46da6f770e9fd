"""Observation of the loss, the metrics and the losses of blocks on one rank, from step to step.

    watch          before a step: which microbatches are kept, to be compared with the reductions found so far
    is_doubted     as figures are reduced: whether this rank has found something that all ranks have to know
    findings       at an exchange between ranks: all that this rank has found since the last one

A function is examined at its first call (`losses.watched_loss`). Later its reduction is compared with microbatches:

    step                                                      compared                          ranks exchange findings
    0, 1, 2, 4, 8, …, and the first that accumulates          all microbatches, by gradients    in any case (`is_due`)
    with units of new shapes, or after a change of state      all microbatches, by gradients    after a doubt
    any other, a function neither torch's nor this package's  a few samples, by values          after a doubt
    any other                                                 nothing                           after a doubt

The first row ends once all ranks trust all functions (`note_exchange`). Evaluations have numbers of their own; in the
first two rows they are compared by values too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from quintsched.plan import Plan

from ...blocks.without_side_effects import tensors_of_training
from ...guards.weights_not_held import ReadsElsewhere
from ...losses.loss_reductions import LossWeight, Over
from ...losses.recheck_reduction_on_batches import RealBatch, SampleUnit
from ...losses.watched_loss import Examined
from ...losses.weighted_losses import LEARNED, WeighedLoss
from ...losses.weighted_metrics import WeighedMetric
from ...parallel.mesh_groups import MeshGroups
from ...stage.early_stage_losses import FirstLosses, cuts_sequences
from ...stage.rank_stages import RankModel
from ...step_setup.unit_samples import Units
from ..instruction_state import RunOptions
from .sum_losses_across_ranks import StepFigures

_FREE_BYTES = 2 << 20
"""Bytes of outputs that are kept in steps whose values alone are compared."""
_MOST_SHAPES = 64
"""Number of unit shapes that are compared at their first occurrence."""


class LossObserver:
    """Observes the loss function, the metrics and the blocks with losses of one rank.

    Attributes:
        loss, metrics: the caller's functions, weighted.
        examined: what is known of the loss, or of its terms, and of the metrics.
        watched: those of them that are checked further on this rank; none where it calls no loss.
        blocks: findings about losses and backwards of blocks; `first`: the blocks that return losses.
        earlier: figures of the batches whose gradients have been accumulated so far.
        num_shares: number of ranks that compute losses of different microbatches, or of parts of them.
        usual: number of samples of a unit that weighs 1: see `Engine.usual_samples`.
        rule: the rule that all ranks have agreed on; until then, the one that the caller has stated, if any.
        step: number of the step, or of the evaluation; `trains`: which of them it is.
        is_due: whether all ranks exchange findings in this step.
        why_changed: host state that proofs of cuts go by, or that stages share, and that has changed, in words.
    """

    def __init__(self, model: RankModel, groups: MeshGroups, options: RunOptions) -> None:
        self._model = model
        self.loss = WeighedLoss(
            options.loss_fn,
            options.settings.loss_over,
            is_cut=cuts_sequences(model.plan),
            is_captured=options.settings.cuda_graph,
        )
        self.metrics: dict[str, WeighedMetric] = {}
        self.examined = [*self.loss.examined]
        self._reads: list[tuple[WeighedLoss | WeighedMetric, ReadsElsewhere]] = [
            (self.loss, ReadsElsewhere(model.elsewhere, "the loss function"))
        ]
        for name, metric in options.metrics.items():
            weighed = self.metrics[name] = WeighedMetric(name, metric, self.loss)
            weighed.misuses = self.loss.misuses
            self.examined.append(weighed.examined)
            self._reads.append((weighed, ReadsElsewhere(model.elsewhere, f"metric {name!r}")))
        self.first = FirstLosses(is_meant=options.settings.loss_over == "microbatch")
        self.blocks = options.examine_blocks(model, groups)
        ends = {model.plan.layout.rank_of(route.stages[-1]) for route in model.plan.routes}
        self.watched = self.examined if model.pp_rank in ends else []
        self.earlier: list[StepFigures] = []
        self.num_shares = model.num_replicas * model.plan.mesh.axis_size("cp")
        self.rule, self.usual, self.why_changed = self.loss.rule, 1, ""
        self.step = self._num_evaluations = 0
        # of this step: what it is, whether it was looked at, and whether microbatches are compared by gradients
        self.trains, self.is_due = True, False
        self._is_part = self._has_looked = self._has_doubt = self._is_compared = False
        self._sizes = frozenset[int]()  # numbers of samples of its units, in all batches that it accumulates
        # of earlier steps: units whose shapes were compared, the number of the first step that accumulated, a few
        # samples of the first comparison (`RealBatch.beside`), and of earlier batches of an accumulated step
        self._shapes: set[object] = set()
        self._first_accumulated: int | None = None
        self._probe: SampleUnit | None = None
        self._before: SampleUnit | None = None
        # from exchanges: whether comparisons go on in steps 0, 1, 2, 4, …, whether the backward of a block adds a
        # constant, which is right for units of equal size alone, and refusals that all ranks know
        self._is_scheduled, self._adds_constants = True, False
        self._exchanged: dict[Examined, str] = {}

    def watch(self, plan: Plan, units: Units, targets: Sequence[Any], number: int, *, is_part: bool) -> None:
        """Prepare the checks of the `number`-th step, or of an evaluation, before its instructions run.

        `units` is the same object in all steps of the same shapes; `targets` are theirs, None for those that this rank
        does not have; `is_part`: gradient accumulation.
        """
        loss, watched, is_later_part = self.loss, self.watched, is_part and bool(self.earlier)
        self.trains, self._is_part = plan.mode == "train", is_part
        if self.trains:
            self._sizes = units.sizes | self._sizes if self.earlier else units.sizes
        else:
            number, self._num_evaluations = self._num_evaluations, self._num_evaluations + 1
            self._examine_evaluation()
        self.step, self._has_looked, self._has_doubt, loss.was_called = number, False, False, False
        if loss.has_auxiliary and not is_later_part:
            loss.begin_step()
        if is_part and self._first_accumulated is None:
            self._first_accumulated = number
        is_of_first = is_part and self._first_accumulated == number
        self.is_due = is_compared = self._is_scheduled and (is_of_first or not number & (number - 1))
        if self.trains and self.blocks.losses:
            self.blocks.begin_step()
        has_changed = False
        for examined in watched:
            examined.begin_step(targets[0])
            examined.late = examined.late if self.earlier else None
            has_changed = has_changed or bool(examined.since)
        for of, reads in self._reads:
            of.watched = reads if self.is_due or has_changed else None
        loss.is_alone = (num_units := len(units.samples)) * self.num_shares == 1 and not is_part
        self._before = self._before if is_later_part or not self.trains else None
        if not watched:
            return
        if units not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(units)
            is_compared = True
        loss.is_known = loss.is_known and not has_changed
        self._is_compared = is_compared or has_changed
        if self._is_compared:
            before = self._before if is_part else None
            loss.real = RealBatch(num_units, self.num_shares, beside=self._probe, before=before)
        else:
            has_values = any(examined.is_compared for examined in watched)
            loss.real = RealBatch(num_units, free=_FREE_BYTES, beside=self._probe) if has_values else None

    def _examine_evaluation(self) -> None:
        """Examine block losses in evaluation mode, unless the loss of each microbatch is meant."""
        if self.rule != LossWeight(Over.MICROBATCH):
            with tensors_of_training():
                has_examined = self.blocks.examine_evaluation()
            if has_examined:
                self.loss.expect_auxiliary(self.blocks.over_targets())

    def look(self) -> None:
        """Compare losses and metrics with their findings, once per step."""
        if self._has_looked:
            return
        self._has_looked, batch, self.loss.real = True, self.loss.real, None
        if batch is not None:
            self._probe = self._probe or batch.probe
            self._before = self._before or (batch.probe if self.trains and self._is_part else None)
        for one in self.watched:
            if batch is not None and not (self._is_compared and self.trains):  # gradients may be NaN there
                one.compare_values(batch)
            one.doubt(batch if self._is_compared else None, self._probe, self.step)
            if (one.since and self.trains) or (one.refusal and self._exchanged.get(one) != one.refusal):
                self._has_doubt = True

    def is_doubted(self) -> bool | torch.Tensor:
        """Whether this rank doubts the loss: state that this reads has changed, or its values contradict the finding.

        Results of value comparisons stay on the device: then a tensor is returned.
        """
        loss, blocks, model = self.loss, self.blocks, self._model
        if loss.was_called:
            self.look()
        if self.trains:
            blocks.end_step()
            self._has_doubt |= loss.has_auxiliary and loss.weighs_otherwise
        if model.prover.later.followed:
            self.why_changed = self.why_changed or model.prover.later.why_changed()
        if model.common is not None:
            self.why_changed = self.why_changed or model.common.why_changed()
        self._has_doubt |= bool(loss.is_uneven or loss.is_learned or loss.misuses or self.why_changed or blocks.since)
        odd = (self._adds_constants and self._has_odd_sizes()) or (model.masks.have_drawn and not model.masks.counts)
        self._has_doubt |= bool(odd or blocks.changed or self.first.refusal or model.buffers.late)
        if not self.watched:
            return self._has_doubt
        late = [examined.late.is_off for examined in self.watched if examined.late is not None]
        return sum(late[1:], late[0]) if late and not self._has_doubt else self._has_doubt

    def _has_odd_sizes(self) -> bool:
        """Whether microbatches of this rank have numbers of samples other than the usual one."""
        return bool(self._sizes - {0, self.usual})

    def findings(self) -> str:
        """Return the findings of this rank, as JSON: the fields of `RankFindings`."""
        for examined in self.watched:
            examined.conclude(self.step)
        loss, its, unlinear = self.loss, self.loss.examined, self.blocks.unlinear
        is_known = loss.rule is not None and (not its or not loss.is_settled or loss.was_called)
        rule = json.dumps(asdict(loss.rule) | {"of_each": loss.of_each}) if loss.rule and is_known else ""
        of_any = [
            *(loss.misuses or ())[:1],
            self.why_changed,
            self.first.refusal,
            LEARNED if loss.is_learned else "",
            *(reads.refusal for _, reads in self._reads),
        ]
        since = next((f"since {one.since} has changed, " for one in its if one.since), "")
        return json.dumps(
            {
                "rule": rule,
                "refusal": loss.refusal and since + loss.refusal,
                "of_metrics": next((metric.refusal for metric in self.metrics.values() if metric.refusal), ""),
                "since": self.blocks.since,
                "unlinear": unlinear.why,
                "adds_constant": unlinear.adds,
                "is_of_each": unlinear.is_of_each,
                "has_odd_sizes": self._has_odd_sizes(),
                "of_any": next(filter(None, of_any), ""),
                "is_blind": any(one.is_blind or one.was_blind for one in its),
                "of_each": its[0].of_each if its else None,
                "rests": {path: why for one in its for path, why in one.rests.items()},
                "is_watched": any(not one.is_believed for one in self.watched),
                "has_supposed": loss.has_supposed and not loss.is_settled,
            }
        )

    def note_exchange(self, *, is_scheduled: bool, adds_constants: bool) -> None:
        """Record that findings have been exchanged: the refusals and changes of state among them cause no doubt again.

        `is_scheduled`: whether any rank watches a function; `adds_constants`: whether any has a block that does so.
        """
        self._is_scheduled, self._adds_constants = is_scheduled or not self.loss.is_settled, adds_constants
        self._exchanged = {one: one.refusal for one in self.examined}
        for examined in self.examined:
            examined.since, examined.was_blind = "", False
        if self.loss.is_settled:
            self.watched = [one for one in self.watched if not one.is_believed]
