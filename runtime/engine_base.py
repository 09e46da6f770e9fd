"""An engine's half that training and forward runs have in common: a plan, bound to one rank's part of a user's blocks.

EngineBase            plan, transport, groups, stages, weights by name; settles a batch, runs it forward
  ├─ Engine           and loss, gradients, optimizers: steps
  └─ ForwardEngine    and nothing else: weights alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from quintsched.errors import MisfitError, UsageError
from quintsched.files.terminal_progress import progress
from quintsched.plan import Plan
from quintsched.simulation.message_slots import MAX_SENDS

from .agreement.engine_settings_between_ranks import agree_on_options
from .agreement.refuse_unequal_ranks import Section
from .blocks.block_builders import Blocks
from .blocks.without_side_effects import tensors_of_training
from .comm import Transport
from .comm.choose_transport import connect_for, watch_by
from .comm.host_collectives import CALLS, ControlGroup
from .interpreter.bind_and_run_plans import PlanRunner
from .interpreter.busy_clock import Clock
from .interpreter.handler_table_and_loop import PreparedStep
from .interpreter.instruction_state import RunOptions
from .interpreter.step_losses.sum_losses_across_ranks import StepResult
from .interpreter.trace_recorder import Recorder
from .optim.accepted_optimizer_forms import Builder
from .optim.build_optimizers import OptimizerBuilds
from .optim.loss_scale import LossScale
from .parallel.mesh_groups import make_groups
from .plan_requirements import require_capturable, require_runnable
from .saving.engine_methods.engine_saves import EngineSaves, WeightState
from .saving.engine_methods.engine_weights import EngineWeights
from .saving.pretrained.model_tensor_names import ModelNames
from .saving.rank_tensor_inventory import RankTensors
from .saving.weight_averages import Averages
from .settings.engine_settings import RunSettings
from .splitting.split_whole_model import Split
from .stage.batches.microbatches import without_samples
from .stage.build_stages import take_from_others
from .stage.rank_properties import RankView
from .stage.rank_stages import RankModel
from .stage.tied_weights import with_ties
from .step_setup.engine_plans import StepPlans
from .weights_and_gradients.grad_buckets import VERSION
from .weights_and_gradients.training_state import TrainingState


class EngineBase(WeightState, RankView):
    """Binds a plan to blocks; who trains, and who does not, go on from here.

    Attributes:
        plan, transport, settings: as they are used.
        everyone: all ranks, for questions to each other.
        clock: adds up the time in which this rank computes.
    """

    plan: Plan
    transport: Transport
    settings: RunSettings
    _scale: LossScale
    _prepare: Callable[[Any], Any] | None

    def _begin(
        self,
        plan: Plan,
        blocks: Blocks,
        settings: RunSettings,
        block_costs: Sequence[float] | None,
        transport: Transport | None,
    ) -> int | None:
        """Settle plan, settings and transport; return how many sends of a channel may be in flight, None: any number.

        Raises `UnsoundError` for a plan that is not proved for the transport.
        """
        self.settings = settings
        self.settings = _as_split(settings, blocks) if isinstance(blocks, Split) else settings
        if isinstance(blocks, Split) or plan.mode == "forward":  # which has no gradients to add up in some order
            plan = with_ties(plan, blocks, self.settings.tied or {}, block_costs)
        self.plan, self.transport = plan, transport or _connect(plan, self.settings)
        return MAX_SENDS if require_runnable(plan, self.transport).profiles["blocking"] else None

    def _agree_on_settings(self, blocks: Blocks, beside: Mapping[str, Any]) -> None:
        """Refuse, on all ranks alike, what they have not alike, and what no plan of theirs can do (collective)."""
        take_from_others(blocks)
        settings, scale = self.settings, self._scale.state_dict()
        if settings.cuda_graph:
            require_capturable(self.plan, self.transport.device, scales=bool(scale))
        agree_on_options(
            self.plan, {**dict(settings), "blocks": len(blocks), **beside, **scale}, self.transport.world_group()
        )
        self.transport.check_everything(settings.verify)

    def _connect_ranks(self) -> None:
        """Open what ranks talk over: groups, and the channels of all plans that the engine runs."""
        self._groups = make_groups(self.plan, self.transport)
        ring = self.settings.context == "ring"
        self._plans = StepPlans(self.plan, self.transport, self._groups.world, ring=ring)
        self._plans.open()
        self._no_samples: tuple[Any, Any, dict[str, Any]] | None = None
        self.everyone = ControlGroup(self._groups.world)
        self._run_id = self.everyone.draw_id()

    def _build(
        self, blocks: Blocks, builder: Builder, block_costs: Sequence[float] | None, *, cut_logits: bool
    ) -> Section | None:
        """Build what the rank holds, stages, gradients, optimizers; return what all ranks have alike of these."""
        settings = self.settings
        with progress("building the stages, and examining their cuts", in_logs=True, rank=self.transport.rank):
            model = self._model = RankModel(
                self.plan,
                blocks,
                self._groups,
                self.transport,
                settings,
                block_costs=block_costs,
                cut_logits=cut_logits,
            )
        builds = OptimizerBuilds(builder, model, self._groups.tensor, settings.zero_split)
        bucket_bytes = int(settings.bucket_mb * 1e6)
        self._state = TrainingState(
            self.plan, model.pp_rank, model.stages, self._groups, model.tied, builds, bucket_bytes=bucket_bytes
        )
        model.bind_copies()
        self._averages = Averages()
        return builds.settings

    def _bind(self, blocks: Blocks, options: RunOptions, recorder: Recorder | None = None) -> None:
        """Make what runs steps, and what hands weights over by the names that the model has for them."""
        self.clock = Clock(self.transport.device)
        self._runner = PlanRunner(self._model, self._state, self._groups, self.transport, self.clock, options, recorder)
        names = ModelNames.from_blocks(blocks, self._model.outlines, self._model.tied.names)
        runner, averages = self._runner, self._averages
        self._rank = RankTensors(self._model, self._state, self._groups, names, runner.steps, self._scale, averages)
        self.weights = EngineWeights(self._rank)
        self.saves = EngineSaves(self._rank, self._run_id, lambda: runner.accumulates)
        self._model.hold.undo.append(self._state.gradients.hooks.remove)

    def _settle(
        self,
        plan: Plan,
        inputs: Any,
        targets: Any,
        extras: Mapping[str, Any],
        microbatches: int | None = None,
        *,
        needs_loss: bool = True,
    ) -> PreparedStep:
        """Cut a batch, and settle with the other ranks what its units are."""
        self.transport.waits.call = CALLS.index("step" if plan.mode == "train" else "evaluate or run")
        if self._model.hold.ended:
            raise UsageError(self._model.hold.ended)
        if self._runner.is_broken:
            raise UsageError("an earlier step failed half-way, so gradients and messages are lost; make a new engine")
        if torch.is_inference_mode_enabled():
            with tensors_of_training():
                return self._settle(plan, inputs, targets, extras, microbatches, needs_loss=needs_loss)
        try:
            if plan.mode == "train" and self._state.masters.are_watched:
                self._state.take_in_changes()
            if plan.mode == "train" and [*map(VERSION, self._state.shown)] != self._state.shown_versions:
                self._state.require_own_gradients()
            for source in self._model.sources:
                source.follow_model()
            prepared = targets if targets is None or self._prepare is None else self._prepare(targets)
            batch = self._model.batches(plan, inputs, prepared, extras, microbatches, needs_loss=needs_loss)
        except (MisfitError, UsageError) as error:
            self._runner.refuse(plan, error)
            raise
        if self._no_samples is None:
            self._no_samples = without_samples(inputs), without_samples(targets), without_samples(dict(extras))
        self._model.publish(batch.kind, inputs, targets)
        return self._runner.prepare(plan, batch, (inputs, targets, extras))

    def _run_forward(
        self, inputs: Any, targets: Any, extras: Mapping[str, Any], microbatches: int | None, *, wants_outputs: bool
    ) -> StepResult:
        """Run a batch forward only, with the blocks in evaluation mode; targets may be None who `wants_outputs`."""
        plan = self._plans.evaluation(microbatches)
        step = self._settle(plan, inputs, targets, extras, microbatches, needs_loss=not wants_outputs)
        return self._model.evaluating(
            partial(torch.no_grad()(self._runner.run_step), step, wants_outputs=wants_outputs)
        )

    def close(self) -> None:
        """Hang up; no step can follow, and another engine may have the blocks, unless they are sharded (tp, ZeRO-3)."""
        self._model.hold.end("this engine was closed; make a new one")
        self.transport.close()


def _as_split(settings: RunSettings, blocks: Split) -> RunSettings:
    """Return settings with what a split model says of its rules and ties."""
    tied = blocks.tied if settings.tied is None else settings.tied
    return settings.model_copy(update={"rules": {**settings.rules, **blocks.rules}, "tied": tied})


def _connect(plan: Plan, settings: RunSettings) -> Transport:
    watch = watch_by(settings)
    return connect_for(plan, watch.timeout_s, watch=watch)
