"""Agreement of all ranks on the loss and the metrics of a run: on the rule by which microbatches are weighted.

    observe    `observe_losses`              before and within each step, each rank for itself
    exchange   `RunLosses.settle_rule`       at `ClipGrad`, before weights change; in an evaluation, at its end
    decide     `exchanged_loss_findings`     each rank from the findings of all of them, so that all decide the same

The loss of a run is in one of these states, on all ranks:

    state      begins when                           ranks exchange findings                       a step
    unknown    the run begins                        in each step                                  is run and checked
    settled    a rank has found the rule             in steps that are due, or after a doubt       is run and checked
    refused    no rule fits, or one is contradicted  the same                                      raises `MisfitError`

A rank's doubt is reduced with the figures of the step, so that all ranks know of it and exchange findings. In the first
step they do so in any case, also where the caller has stated the rule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from ...blocks.block_builders import Parcel
from ...blocks.dtype_names import some_numbers
from ...blocks.trees import map_tensors
from ...comm.host_collectives import reduce_numbers, share_texts
from ...losses.loss_reductions import LossWeight, Over
from ...losses.weighted_losses import NO_WEIGHT, SUMS
from ...parallel.cut_proofs.trial_inputs import FirstUnits
from ...parallel.mesh_groups import MeshGroups
from ...stage.batches.microbatches import Batch
from ...stage.rank_stages import RankModel
from ...step_setup.block_examination_results import GatheredWeights
from ..instruction_state import RunOptions
from .exchanged_loss_findings import MEANT, RankFindings, agreed_rule, why_uneven, why_unlinear
from .observe_losses import LossObserver

_HAS_LOSS = attrgetter("has_loss")
_LATE = (
    "in an evaluation the loss, found to be {}, or a metric is not what it was found to be: of several microbatches "
    "together it has another value than theirs make up, or some rank refuses it in its own words; return (sum, weight)"
)


class Refusals(NamedTuple):
    """Refusals that all ranks have decided, in the order in which they are raised; "": none.

    Attributes:
        of_any: holds even for a step of a single microbatch.
        of_blocks: of a loss or backward of blocks; a step of one microbatch that is weighted by samples ignores it.
        of_metrics, of_loss: of the functions themselves; a step of one microbatch ignores them.
    """

    of_any: str = ""
    of_blocks: str = ""
    of_metrics: str = ""
    of_loss: str = ""


class RunLosses:
    """The loss function and the metrics of a run, with the findings about them.

    Attributes:
        observer: finds, on this rank, what ranks agree on.
        loss, metrics: the caller's functions, weighted.
        earlier: figures of the batches whose gradients have been accumulated so far.
        first: the blocks that return losses; `blocks`: findings about losses and backwards of blocks.
        of_evaluation: why the loss of the last evaluation is wrong, in words; "": no error known.
        samples_per_weight: number of samples for a weight of 1, where the loss is weighted by samples; else 1.
    """

    def __init__(self, model: RankModel, groups: MeshGroups, device: torch.device, options: RunOptions) -> None:
        self._model, self._groups, self._device = model, groups, device
        self.observer = observer = LossObserver(model, groups, options)
        self.loss, self.metrics, self.earlier = observer.loss, observer.metrics, observer.earlier
        self.first, self.blocks = observer.first, observer.blocks
        self.loss.is_wanted, self._never_called = options.finds_loss, not options.finds_loss
        self._refusals, self.of_evaluation, self.samples_per_weight = Refusals(), "", 1

    def begin_step(self, plan: Plan, targets: Sequence[Any], *, last: bool) -> None:
        """Pass the step's targets to a loss that is a `SumOfMeans`, which counts what they are over (collective).

        `targets` are those of each unit, as far as the rank has them. Raises `UsageError` under gradient accumulation.
        """
        if not last or self.earlier:
            raise UsageError(
                "a SumOfMeans is weighed by all that a step is over; give its batch in one step, without last=False"
            )
        is_alone = self.observer.num_shares == 1 and len(plan.routes) == 1
        given = [some for some in targets if some is not None] if self._ends_first_route(plan) else []
        self.loss.begin_means(given, self._device, None if is_alone else self._groups.metrics)

    def _ends_first_route(self, plan: Plan) -> bool:
        """Whether this rank has the last stage of the first route, and so its targets."""
        return self._model.pp_rank == plan.layout.rank_of(plan.routes[0].stages[-1])

    def expect_auxiliary(
        self, plan: Plan, batch: Batch, samples: Sequence[range], usual: int, parcels: Sequence[Parcel]
    ) -> None:
        """Prepare for auxiliary losses of blocks, if there are any: they are weighted as the loss is (collective).

        Args:
            plan: the plan that runs first.
            batch: the units' targets.
            samples: the samples of each unit.
            usual: number of samples of a unit that weighs 1: at first, of the largest one.
            parcels: the shapes of each block's output.
        """
        self.observer.usual = usual
        loss, is_sum = self.loss, False
        if not (loss.is_wanted and any(map(_HAS_LOSS, parcels))):
            return
        loss.expect_auxiliary()
        if not self._any_rank(any(len(some) != usual for some in samples)):
            return
        if self._ends_first_route(plan) and len(samples[0]) and batch.targets[0] is not None:
            numbers = map_tensors(some_numbers, parcels[-1].output.empty(self._device))
            is_sum = loss.try_kind(numbers, batch.targets[0], len(samples[0])) in SUMS
        if self._any_rank(is_sum):
            loss.supposed = Over.SUM

    def _any_rank(self, here: bool) -> bool:
        """Whether `here` is true on any rank (collective)."""
        return reduce_numbers(self._groups.world, [here])[0] > 0

    def expect_apart(self, paths: frozenset[str]) -> None:
        """Register the paths of output tensors that have no sample dimension."""
        self.loss.apart |= paths
        for examined in self.observer.examined:
            examined.apart |= paths

    def examine_blocks(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Examine block backwards and losses before the first step (collective); see `BlockFindings`."""
        if self.loss.rule != LossWeight(Over.MICROBATCH):
            self.blocks.examine_backwards(units, parcels, gathered)
        self.blocks.examine_losses(units, parcels, gathered)
        if any(map(_HAS_LOSS, parcels)):
            self.loss.expect_auxiliary(self.blocks.over_targets())

    def settle_rule(self, plan: Plan, *, accumulates: bool, again: bool = False) -> None:
        """Agree across ranks on what the loss is a mean over, before weights change.

        Collective in steps until a rank has found it, in steps that are due, and `again` after a doubt; else local.
        Raises `MisfitError` on all ranks; a single microbatch ignores some `Refusals`: its loss may be over anything.
        """
        observer, model = self.observer, self._model
        if not (accumulates or model.late_state.is_empty):
            model.late_state.look()
        if self.loss.was_called:
            observer.look()
        if again and observer.trains:
            self.blocks.examine_changed()
            model.buffers.learn_late(self._groups.world)
            model.masks.count_late(self._groups.world)
        if not self.loss.is_settled or observer.is_due or again:
            self._agree()
            self._never_called = not self.loss.is_settled
        elif not any(self._refusals):
            return
        found = self._refusals
        is_alone = plan.schedule.num_units * observer.num_shares == 1 and not accumulates and not self.earlier
        why = found.of_any or ("" if is_alone and self.loss.is_bare else found.of_blocks)
        if why := why or ("" if is_alone else found.of_metrics or found.of_loss):
            raise MisfitError(why)

    def _agree(self) -> None:
        """Exchange the findings of all ranks, decide on the rule of the loss and on refusals, and adopt both."""
        loss, observer = self.loss, self.observer
        findings = RankFindings.from_texts(share_texts(self._groups.world, observer.findings()))
        since = next(filter(None, findings.since), "")
        if since:
            self.blocks.examine_again()
        rule, of_loss = agreed_rule(findings, loss.supposed, observer.step)
        if rule is not None:
            loss.take_over(rule)
            observer.rule = rule
        loss.is_settled = loss.is_settled or any(findings.rule)
        of_block_losses = self.blocks.why_wrong(loss.rule)
        self._refusals = Refusals(
            next(filter(None, findings.of_any), ""),
            why_unlinear(findings, loss.rule, weighs_by_samples=loss.is_bare)
            or (of_block_losses and (since and f"since {since} has changed, ") + of_block_losses + MEANT),
            next(filter(None, findings.of_metrics), ""),
            of_loss,
        )
        over = observer.rule and observer.rule.over
        self.samples_per_weight = observer.usual if over is Over.SAMPLES else 1
        observer.note_exchange(is_scheduled=any(findings.is_watched), adds_constants=any(findings.adds_constant))

    def why_late(self) -> str:
        """Return the error to raise for an evaluation if some rank doubts it, in words; "": a doubt is no error."""
        if why := next(iter(self.loss.misuses or ()), "") or self.first.refusal or self.observer.why_changed:
            return why
        if self.loss.is_uneven:
            return NO_WEIGHT.format(self.loss.refusal) + MEANT
        return "" if self.loss.is_alone else _LATE.format(self.loss.rule) + MEANT

    def settle_evaluation(self, plan: Plan, *, wants_outputs: bool) -> None:
        """Agree across ranks after an evaluation; one that only returns outputs may never find a loss."""
        if wants_outputs and self._never_called:
            return
        self.settle_rule(plan, accumulates=False)
        loss, world = self.loss, self._groups.world
        if loss.has_auxiliary and (why := why_uneven(share_texts(world, json.dumps(loss.of_each)))):
            raise MisfitError(NO_WEIGHT.format(f"in an evaluation {why}") + MEANT)
        is_any = loss.is_alone and loss.is_bare
        why = "" if is_any else self.blocks.why_wrong(self.observer.rule, evaluates=True)
        self.of_evaluation = why and why + MEANT
        if why and not wants_outputs:
            raise MisfitError(self.of_evaluation)
