"""The loss and the metrics of a run: examined, checked from step to step, and agreed on by all ranks.

first call        finds the unit: samples, tokens, …        all ranks agree before weights first change
step 0, 1, 2, 4   compares it with the microbatches          all ranks exchange their findings
other steps       checks the state that the loss reads, and values of user code; compares again after a change
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter, itemgetter
from typing import Any

import torch

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from ...blocks.block_builders import Parcel
from ...blocks.dtype_names import some_numbers
from ...blocks.trees import map_tensors
from ...blocks.without_side_effects import tensors_of_training
from ...comm.host_collectives import reduce_numbers, share_texts
from ...guards.weights_not_held import ReadsElsewhere
from ...losses.loss_reductions import LossWeight, Over
from ...losses.reduction_check_on_batches import RealBatch, SampleUnit, why_rests_misfit
from ...losses.watched_loss import Examined
from ...losses.weighted_losses import LEARNED, NO_WEIGHT, NOT_STATED, SUMS, WeighedLoss
from ...losses.weighted_metrics import WeighedMetric
from ...parallel.cut_proofs.trial_inputs import FirstUnits
from ...parallel.mesh_groups import MeshGroups
from ...stage.batches.microbatches import Batch
from ...stage.early_stage_losses import FirstLosses, cuts_sequences
from ...stage.rank_stages import RankModel
from ...step_setup.block_examination_results import GatheredWeights
from ...step_setup.unit_samples import Units
from ..instruction_state import RunOptions
from .exchanged_loss_findings import Told, rule_in_words, rule_of, why_uneven, with_nothing
from .sum_losses_across_ranks import StepFigures

_HAS_LOSS = attrgetter("has_loss")
_FREE_BYTES = 2 << 20
"""Bytes of outputs that are kept in steps whose values alone are compared."""
_MOST_SHAPES = 64
"""Number of unit shapes that are compared at their first occurrence."""

_UNLIKE_FIRST = (
    "blocks have losses of their own beside it, which were weighed before it was called first; give a first step whose "
    "microbatches are alike, since these are"
)
UNLINEAR = (
    "{}: the gradients there are those of a microbatch, times what its loss weighs, and not of the batch; clip "
    "in the optimizer, Engine(…, clip=…), return an auxiliary loss beside the output, (output, loss)"
)
LATE = (
    "in an evaluation the loss, found to be {}, or a metric is not what it was found to be: of several microbatches "
    "together it has another value than theirs make up, or some rank refuses it in its own words; return (sum, weight)"
)
_SAY_WHICH = '; where targets mask none, one is the other: say that it is over samples, loss_over="samples"'
_MEANT = (
    ', or say that the loss of each microbatch is meant: Engine(…, loss_over="microbatch"), in a job '
    "train.loss_over: microbatch"
)


class RunLosses:
    """The loss function and the metrics of a run, with the findings about them.

    Attributes:
        loss, metrics: the caller's functions, weighted.
        earlier: figures of the batches whose gradients have been accumulated so far.
        first: the blocks that return losses; `blocks`: findings about these losses.
        of_evaluation: why the loss of the last evaluation is wrong, in words; "": no error known.
        unit: number of samples that a weight of 1 stands for, where the loss is weighted by samples; else 1.
    """

    def __init__(self, model: RankModel, groups: MeshGroups, device: torch.device, options: RunOptions) -> None:
        self._model, self._groups, self._device = model, groups, device
        self.loss = WeighedLoss(
            options.loss_fn,
            options.settings.loss_over,
            is_cut=cuts_sequences(model.plan),
            is_captured=options.settings.cuda_graph,
        )
        self.metrics = {name: WeighedMetric(name, metric, self.loss) for name, metric in options.metrics.items()}
        for weighed in self.metrics.values():
            weighed.misuses = self.loss.misuses
        self.earlier: list[StepFigures] = []
        self.first = FirstLosses(is_meant=options.settings.loss_over == "microbatch")
        self._examined = [*self.loss.examined, *(metric.examined for metric in self.metrics.values())]
        self._num_shares = model.num_replicas * model.plan.mesh.axis_size("cp")
        self.loss.is_wanted, self._asked_in_vain = options.finds_loss, not options.finds_loss
        self._is_due = self._has_looked = self._has_doubt = False
        self._is_watched, self._has_gradients, self._trains, self._is_part = True, False, True, False
        self._refusal = self._of_metrics = self._of_any = self._of_pairs = ""
        self._told: dict[Examined, str] = {}
        ends = {model.plan.layout.rank_of(route.stages[-1]) for route in model.plan.routes}
        self._watched = self._examined if model.pp_rank in ends else []
        functions: dict[str, WeighedLoss | WeighedMetric] = {"the loss function": self.loss}
        functions |= {f"metric {name!r}": m for name, m in self.metrics.items()}
        self._reads = [(of, ReadsElsewhere(model.elsewhere, what)) for what, of in functions.items()]
        self.blocks = options.examine_blocks(model, groups)
        self._of_blocks, self._adds, self._usual, self._sizes = "", False, 1, frozenset[int]()
        self._probe: SampleUnit | None = None
        self._before: SampleUnit | None = None
        self._first_parts: int | None = None
        self._units: set[object] = set()
        self._step = self._num_evaluations = 0
        self._rule, self.of_evaluation, self.unit = self.loss.rule, "", 1

    def begin_step(self, plan: Plan, targets: Sequence[Any], *, last: bool) -> None:
        """Pass its batch to a loss that is a `SumOfMeans` (collective).

        `targets` are those of each unit, as far as the rank has them. Raises `UsageError` under gradient accumulation.
        """
        if not last or self.earlier:
            raise UsageError(
                "a SumOfMeans is weighed by all that a step is over; give its batch in one step, without last=False"
            )
        holds_all = self._model.pp_rank == plan.layout.rank_of(plan.routes[0].stages[-1])
        is_alone = self._num_shares == 1 and len(plan.routes) == 1
        given = [some for some in targets if some is not None] if holds_all else []
        self.loss.begin_means(given, self._device, None if is_alone else self._groups.metrics)

    def expect_others(
        self, plan: Plan, batch: Batch, samples: Sequence[range], usual: int, parcels: Sequence[Parcel]
    ) -> None:
        """Prepare for auxiliary losses of blocks, if there are any: they are weighted as the loss is (collective).

        Args:
            plan: the plan that runs first.
            batch: the units' targets.
            samples: the samples of each unit.
            usual: number of samples that most units have.
            parcels: the shapes of each block's output.
        """
        self._usual = usual
        loss, is_sum = self.loss, False
        if not (loss.is_wanted and any(map(_HAS_LOSS, parcels))):
            return
        loss.expect_others()
        holds_all = self._model.pp_rank == plan.layout.rank_of(plan.routes[0].stages[-1])
        if not self._says_any(any(len(some) != usual for some in samples)):
            return
        if holds_all and len(samples[0]) and batch.targets[0] is not None:
            numbers = map_tensors(some_numbers, parcels[-1].output.empty(self._device))
            is_sum = loss.try_kind(numbers, batch.targets[0], len(samples[0])) in SUMS
        if self._says_any(is_sum):
            loss.supposed = Over.SUM

    def expect_apart(self, paths: frozenset[str]) -> None:
        """Register the paths of output tensors that have no sample dimension."""
        self.loss.apart |= paths
        for examined in self._examined:
            examined.apart |= paths

    def _says_any(self, here: bool) -> bool:
        """Whether `here` is true on any rank (collective)."""
        return reduce_numbers(self._groups.world, [here])[0] > 0

    def examine_blocks(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Examine block backwards and losses before the first step (collective); see `BlockFindings`."""
        if self.loss.rule != LossWeight(Over.MICROBATCH):
            self.blocks.examine_backwards(units, parcels, gathered)
        self.blocks.examine_losses(units, parcels, gathered)
        if any(map(_HAS_LOSS, parcels)):
            self.loss.expect_others(self.blocks.over_targets())

    def _examine_evaluation(self) -> None:
        """Examine block losses in evaluation mode, unless the loss of each microbatch is meant."""
        if self._rule == LossWeight(Over.MICROBATCH):
            return
        with tensors_of_training():
            has_examined = self.blocks.examine_evaluation()
        if has_examined:
            self.loss.expect_others(self.blocks.over_targets())

    def watch(self, plan: Plan, units: Units, targets: Sequence[Any], number: int, *, is_part: bool) -> None:
        """Prepare the checks of the `number`-th step, or of an evaluation, before its instructions run.

        `units`, with their `targets` or None, are one object for all steps of the same shapes; `is_part`: gradient
        accumulation.
        """
        self._trains, self._is_part = plan.mode == "train", is_part
        if self._trains:
            self._sizes = units.sizes | self._sizes if self.earlier else units.sizes
        else:
            number, self._num_evaluations = self._num_evaluations, self._num_evaluations + 1
            self._examine_evaluation()
        self._step, self._has_looked, self._has_doubt, self.loss.was_called = number, False, False, False
        if self.loss.has_others and not (is_part and self.earlier):
            self.loss.begin_step()
        self._first_parts = number if is_part and self._first_parts is None else self._first_parts
        is_first = is_part and self._first_parts == number
        self._is_due = is_compared = self._is_watched and (is_first or not number & (number - 1))
        if self._trains and self.blocks.losses:
            self.blocks.begin_step()
        for examined in self._watched:
            examined.begin_step(targets[0])
        is_new = self._is_due or (bool(self._watched) and any(examined.since for examined in self._watched))
        for of, reads in self._reads:
            of.watched = reads if is_new else None
        self.loss.is_alone = (num_units := len(units.samples)) * self._num_shares == 1 and not is_part
        self._before = None if self._trains and not (is_part and self.earlier) else self._before
        if not self._watched:
            return
        if units not in self._units and len(self._units) < _MOST_SHAPES:
            self._units.add(units)
            is_compared = True
        for examined in self._watched:
            examined.late = examined.late if self.earlier else None
            if examined.since:
                is_compared, self.loss.is_known = True, self.loss.is_known and not examined.since
        self._has_gradients = is_compared
        if is_compared:
            before = self._before if is_part else None
            self.loss.real = RealBatch(num_units, self._num_shares, beside=self._probe, before=before)
        else:
            has_values = any(examined.is_compared for examined in self._watched)
            self.loss.real = RealBatch(num_units, free=_FREE_BYTES, beside=self._probe) if has_values else None

    def is_doubted(self) -> bool | torch.Tensor:
        """Whether this rank doubts the loss: state that it reads has changed, or it contradicts its finding.

        Results of value comparisons stay on the device: then a tensor is returned.
        """
        loss, blocks, model = self.loss, self.blocks, self._model
        if loss.was_called:
            self._look()
        if self._trains:
            blocks.end_step()
            self._has_doubt |= loss.has_others and loss.weighs_otherwise
        if model.prover.later.followed:
            self._of_pairs = self._of_pairs or model.prover.later.why_changed()
        if model.common is not None:
            self._of_pairs = self._of_pairs or model.common.why_changed()
        self._has_doubt |= bool(loss.is_uneven or loss.is_learned or loss.misuses or self._of_pairs or blocks.since)
        odd = self._adds and self._has_odd_sizes()
        odd = odd or (model.masks.have_drawn and not model.masks.counts)
        self._has_doubt |= bool(odd or blocks.changed or self.first.refusal or model.buffers.late)
        if not self._watched:
            return self._has_doubt
        late = [examined.late.is_off for examined in self._watched if examined.late is not None]
        return sum(late[1:], late[0]) if late and not self._has_doubt else self._has_doubt

    def settle_unit(self, plan: Plan, *, accumulates: bool, again: bool = False) -> None:
        """Agree across ranks on the unit of the loss's mean, before weights change (collective in some steps).

        Collective until a rank has found it, in steps that are compared on all ranks, and `again` after a doubt.
        Raises `MisfitError` on all ranks, unless there is a single microbatch, whose loss may be over anything.
        """
        if not (accumulates or self._model.late_state.is_empty):
            self._model.late_state.look()
        if self.loss.was_called:
            self._look()
        if again and self._trains:
            self.blocks.examine_changed()
            self._model.buffers.learn_late(self._groups.world)
            self._model.masks.count_late(self._groups.world)
        if not self.loss.is_settled or self._is_due or again:
            self._agree()
            self._asked_in_vain = not self.loss.is_settled
        elif not (self._refusal or self._of_metrics or self._of_any or self._of_blocks):
            return
        is_alone = plan.schedule.num_units * self._num_shares == 1 and not accumulates and not self.earlier
        if why := self._of_any or ("" if is_alone and self.loss.is_bare else self._of_blocks):
            raise MisfitError(why)
        if is_alone:
            return
        if self._of_metrics:
            raise MisfitError(self._of_metrics)
        if self._refusal:
            raise MisfitError(self._refusal)

    def _has_odd_sizes(self) -> bool:
        """Whether microbatches of this rank have numbers of samples other than the usual one."""
        return bool(self._sizes - {0, self._usual})

    def why_late(self) -> str:
        """Return the error in an evaluation that some rank doubts, in words; "": possibly none."""
        if why := next(iter(self.loss.misuses or ()), "") or self.first.refusal or self._of_pairs:
            return why
        if self.loss.is_uneven:
            return NO_WEIGHT.format(self.loss.refusal) + _MEANT
        return "" if self.loss.is_alone else LATE.format(self.loss.rule) + _MEANT

    def settle_evaluation(self, plan: Plan, *, wants_outputs: bool) -> None:
        """Agree across ranks after an evaluation; one that only returns outputs may never find a loss."""
        if wants_outputs and self._asked_in_vain:
            return
        self.settle_unit(plan, accumulates=False)
        if self.loss.has_others:
            self._require_even()
        why = "" if self.loss.is_alone and self.loss.is_bare else self.blocks.why_wrong(self._rule, evaluates=True)
        self.of_evaluation = why and why + _MEANT
        if why and not wants_outputs:
            raise MisfitError(self.of_evaluation)

    def _require_even(self) -> None:
        """Raise `MisfitError` where samples of an evaluation have different weights on some ranks (collective)."""
        if why := why_uneven(share_texts(self._groups.world, json.dumps(self.loss.of_each))):
            raise MisfitError(NO_WEIGHT.format(f"in an evaluation {why}") + _MEANT)

    def _look(self) -> None:
        """Compare losses and metrics with their findings, once per step."""
        if self._has_looked:
            return
        self._has_looked, batch, self.loss.real = True, self.loss.real, None
        if batch is not None:
            self._probe = self._probe or batch.probe
            self._before = self._before or (batch.probe if self._trains and self._is_part else None)
        for one in self._watched:
            if batch is not None and not (self._has_gradients and self._trains):  # gradients may be NaN there
                one.compare_values(batch)
            one.doubt(batch if self._has_gradients else None, self._probe, self._step)
            if (one.since and self._trains) or (one.refusal and self._told.get(one) != one.refusal):
                self._has_doubt = True

    def _agree(self) -> None:
        """Exchange the findings of all ranks, and settle the rule of the loss and any refusals."""
        for examined in self._watched:
            examined.conclude(self._step)
        texts = share_texts(self._groups.world, json.dumps(self._mine()))
        told = Told.from_texts(texts)
        since = next(filter(None, told.since), "")
        if since:
            self.blocks.examine_again()
        refusal = next(filter(None, told.refusal), "")
        self._of_metrics = next(filter(None, told.of_metrics), "")
        self._of_any = next(filter(None, told.of_any), "")
        rules = with_nothing(told.rule)
        found = {rule: rank for rank, rule in reversed([*enumerate(rules)]) if rule}
        of_each = {each: rank for rank, each in enumerate(told.of_each) if each is not None}
        if len(found) > 1 and not refusal:
            refusal = "; ".join(
                f"rank {rank} has found {rule_in_words(rule)}"
                for rule, rank in sorted(found.items(), key=itemgetter(1))
            )
            refusal += _SAY_WHICH if {rule_of(rule).over for rule in found} == {Over.SAMPLES, Over.TOKENS} else ""
        if len(of_each) > 1 and not refusal:
            numbers = " and ".join(f"{number:g} on rank {rank}" for number, rank in of_each.items())
            refusal = f"in step {self._step} it is over unlike numbers of things for a sample: {numbers}"
        refusal = refusal or why_rests_misfit(told.rests, are_all=True)
        if found and not refusal:
            rule = rule_of(next(iter(found)))
            if any(told.has_supposed) and (rule.over in SUMS) != (self.loss.supposed in SUMS):
                refusal = f"{_UNLIKE_FIRST} of unlike size, and it is {rule}"
            self.loss.take_over(rule)
            self._rule = rule
            if any(told.is_blind) and rule != LossWeight(Over.SAMPLES):
                refusal = "some microbatches of a step have a gradient, and others have none"
        is_meant = self.loss.rule == LossWeight(Over.MICROBATCH)
        is_sum, is_bare = self.loss.rule == LossWeight(Over.SUM), self.loss.is_bare
        weighs_samples = self._rule is not None and self._rule.over is Over.SAMPLES
        self.unit = self._usual if self.loss.examined and weighs_samples else 1
        adds_right, self._adds = is_bare and not any(told.has_odd_sizes), any(told.adds)
        by_rank = zip(told.unlinear, told.adds, told.is_of_each, strict=True)
        wrong = [words for words, adds, each in by_rank if not ((adds and adds_right) or (each and is_sum))]
        why = "" if is_meant else next(filter(None, wrong), "")
        of_losses = self.blocks.why_wrong(self.loss.rule)
        self._of_blocks = why and UNLINEAR.format(why) + _MEANT
        self._of_blocks = self._of_blocks or (
            of_losses and (since and f"since {since} has changed, ") + of_losses + _MEANT
        )
        words = NOT_STATED if Over.STATED in [rule_of(text).over for text in found] else NO_WEIGHT
        self._refusal = refusal and words.format(refusal) + _MEANT
        self.loss.is_settled = self.loss.is_settled or bool(found)
        self._is_watched = not self.loss.is_settled or any(told.is_watched)
        self._told = {one: one.refusal for one in self._examined}
        for examined in self._examined:
            examined.since, examined.was_blind = "", False
        if self.loss.is_settled:
            self._watched = [one for one in self._watched if not one.is_believed]

    def _mine(self) -> dict[str, Any]:
        """Return the findings of this rank."""
        loss, its = self.loss, self.loss.examined
        is_known = loss.rule is not None and (not its or not loss.is_settled or loss.was_called)
        rule = json.dumps(asdict(loss.rule) | {"of_each": loss.of_each}) if loss.rule and is_known else ""
        of_any = [*(loss.misuses or ())[:1], self._of_pairs]
        of_any += [self.first.refusal, LEARNED if loss.is_learned else "", *(reads.refusal for _, reads in self._reads)]
        since = next((f"since {one.since} has changed, " for one in its if one.since), "")
        return {
            "rule": rule,
            "refusal": loss.refusal and since + loss.refusal,
            "of_metrics": next((metric.refusal for metric in self.metrics.values() if metric.refusal), ""),
            "since": self.blocks.since,
            "unlinear": self.blocks.unlinear.why,
            "adds": self.blocks.unlinear.adds,
            "is_of_each": self.blocks.unlinear.is_of_each,
            "has_odd_sizes": self._has_odd_sizes(),
            "of_any": next(filter(None, of_any), ""),
            "is_blind": any(one.is_blind or one.was_blind for one in its),
            "of_each": its[0].of_each if its else None,
            "rests": {path: told for one in its for path, told in one.rests.items()},
            "is_watched": any(not one.is_believed for one in self._watched),
            "has_supposed": loss.has_supposed and not loss.is_settled,
        }
