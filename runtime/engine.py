"""The engine: trains a list of blocks by a plan; the caller keeps the training loop.

engine = Engine(plan, blocks, loss_fn, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
for inputs, targets in loader:
    result = engine.step(inputs, targets)        # result.loss: a tensor, on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quintsched.arguments import MAPPING, ROW, ours, takes
from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.simulation.message_slots import MAX_SENDS

from .agreement.engine_records import agree_on_functions, agree_on_options
from .agreement.sections import Section
from .blocks.blocks import Blocks
from .blocks.untouched import tensors_of_training
from .comm import Transport
from .comm.connection import connect_for, watch_by
from .comm.control import ControlGroup
from .interpreter.activation_memory import SavedBytes
from .interpreter.busy_clock import Clock
from .interpreter.interpreter import PreparedStep
from .interpreter.plan_runner import PlanRunner
from .interpreter.rank_state import NO_CONTEXT, LossFn, MetricFn, RunOptions
from .interpreter.recorder import Recorder
from .interpreter.tally import StepResult
from .optim.builds import OptimizerBuilds
from .optim.given import Builder, OptimizerGiven, builder_of
from .optim.loss_scale import LossScale
from .parallel.mesh_groups import make_groups
from .parallel.tensor.vocab_loss import takes_vocabulary
from .requirements import (
    require_capturable,
    require_runnable,
    require_usable,
)
from .saving.averages import Averages
from .saving.pretrained.tensor_names import ModelNames
from .saving.rank_tensors import RankTensors
from .saving.verbs.engine_saves import EngineSaves, EngineState
from .saving.verbs.engine_weights import EngineWeights
from .settings.run_settings import RunSettings, taking_settings
from .splitting.split import Split
from .stage.batches.microbatches import without_samples
from .stage.rank_model import RankModel
from .stage.rank_view import RankView
from .stage.sliced_losses import for_slices
from .stage.tied_weights import with_ties
from .state.training_state import TrainingState
from .steps.plans import StepPlans
from .verification.bad_steps import BadSteps
from .verification.block_facts import ModelFacts
from .verification.comparison import Comparison
from .verification.engine_checks import EngineChecks


@taking_settings
class Engine(EngineState, RankView):
    """Runs a pipeline-parallel plan on the caller's blocks, loss and optimizer.

    Args:
        plan: a plan for training; it must be sound under the transport's profile.
        blocks: the model in order: modules, or functions without arguments that each build one (then a rank builds
            its own blocks alone, and `seed` fixes the initial weights for every mesh alike). A block takes the output
            of the block before and, by name, those of step's `extras` that its `forward` has parameters for; it
            returns its output, or (output, its own loss): a sum if the loss is (sum, weight) or a sum, else a mean.
            One that `parallelize_module` has sharded over tp, or `fully_shard` over all replicas, is left as it is.
        loss_fn: (output, targets) → the microbatch's loss, or (sum, weight) where samples or tokens weigh differently.
        optimizer: a function of parameters, a class, several of these, or an instance (see `optim.given`).
        metrics: name → function (output, targets) → a sum, divided by the batch's total weight.
        block_costs: the cost of each block, in any unit; None estimates it. Stages are cut so that the slowest one is
            as fast as possible. A plan that fixes the number of blocks per stage takes no costs.
        grad_scaler: loss scale for fp16; the engine scales losses, unscales gradients and updates the scaler.
        trace_steps: steps, counted from 0, that `save_trace` writes; None: no trace.
        wants_stop: whether this rank is to stop after the step; one such rank sets `stop_asked` in all results.
        spike_dir: directory for the batch of the step after which `NotFiniteError` is raised; None: not stored.
        transport: None takes NCCL or gloo under torchrun, and a one-process transport for a mesh of one rank.
        settings: by name, as `RunSettings` declares them:
            {settings}

    Raises:
        UnsoundError: the plan is not proved for the transport.
        MisfitError: world size, shapes or sizes do not fit the plan, or ranks disagree.
        StallError: a peer died or does not answer.
    """

    @takes(
        "Engine(plan, blocks, loss_fn, optimizer)",
        plan=ours("PlanData"),
        metrics=MAPPING,
        block_costs=ROW,
        transport=ours("Transport"),
    )
    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        loss_fn: LossFn,
        optimizer: OptimizerGiven,
        *,
        metrics: Mapping[str, MetricFn] | None = None,
        block_costs: Sequence[float] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        trace_steps: Collection[int] | None = None,
        wants_stop: Callable[[], bool] = lambda: False,
        spike_dir: str | Path | None = None,
        transport: Transport | None = None,
        **settings: Any,
    ) -> None:
        if plan.mode != "train":
            raise UsageError(f"the engine trains, but the plan is for {plan.mode}; evaluation plans it makes itself")
        self.settings = RunSettings.of_arguments(settings)
        if isinstance(blocks, Split):
            self.settings = _as_split(self.settings, blocks)
            plan = with_ties(plan, blocks, self.settings.tied or {}, block_costs)
        self.plan, self.transport = plan, transport or _connect(plan, self.settings)
        max_sends = MAX_SENDS if require_runnable(plan, self.transport).profiles["blocking"] else None
        metrics = metrics or {}
        given: dict[str, Callable[..., Any]] = {"loss_fn": loss_fn, **metrics}
        require_usable(plan, blocks, given)
        self._prepare, used_loss = for_slices(plan, loss_fn)
        builder, self._scale = builder_of(optimizer, blocks), LossScale(grad_scaler)
        cut_logits = all(map(takes_vocabulary, (used_loss, *metrics.values())))
        self._agree_on_settings({"metrics": [*metrics], "blocks": len(blocks), "cut_logits": cut_logits})
        self._connect_ranks()
        of_optimizers = self._build(blocks, builder, block_costs, cut_logits=cut_logits)
        self._model.shared_state.let_read({"the loss": loss_fn, **{f"metric {n!r}": m for n, m in metrics.items()}})
        agree_on_functions(given if self.needs_targets else None, of_optimizers, self._groups.world)
        bind = self._model.tensor.bind
        options = RunOptions(
            loss_fn=bind(used_loss),
            metrics={name: bind(metric) for name, metric in metrics.items()},
            settings=self.settings,
            scale=self._scale,
            max_sends=max_sends,
            wants_stop=wants_stop,
            shows_modules=any(isinstance(block, nn.Module) for block in blocks),
        )
        self._recorder = Recorder.of(plan, self.transport, trace_steps)
        self._bind(blocks, options, spike_dir)
        kept, world = (self._model, self.masters, self._rank), self._groups.world
        self.checks = EngineChecks(self._settle, self._runner, *kept, world, used_loss, self.settings.clip)

    def _agree_on_settings(self, beside: Mapping[str, Any]) -> None:
        """Compare settings across ranks, and refuse on all ranks a plan that cannot run with them (collective)."""
        settings, scale = self.settings, self._scale.state_dict()
        if settings.cuda_graph:
            require_capturable(self.plan, self.transport.device, scales=bool(scale))
        agree_on_options(self.plan, {**dict(settings), **beside, **scale}, self.transport.world_group())
        self.transport.check_everything(settings.verify)

    def _connect_ranks(self) -> None:
        """Open the process groups, and the channels of all plans that the engine runs."""
        self._groups = make_groups(self.plan, self.transport)
        ring = self.settings.context == "ring"
        self._plans = StepPlans(self.plan, self.transport, self._groups.world, ring=ring)
        self._plans.open()
        self._is_closed = False
        self._no_samples: tuple[Any, Any, dict[str, Any]] | None = None
        self.everyone = ControlGroup(self._groups.world)
        self._run_id = self.everyone.draw_id()

    def _build(
        self, blocks: Blocks, builder: Builder, block_costs: Sequence[float] | None, *, cut_logits: bool
    ) -> Section | None:
        """Build this rank's stages, gradients and optimizers; return the section of them that all ranks share."""
        settings = self.settings
        self._model = model = RankModel(
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

    def _bind(self, blocks: Blocks, options: RunOptions, spike_dir: str | Path | None) -> None:
        """Make the plan runner, and the objects that save and load weights by the model's parameter names."""
        self.clock = Clock(self.transport.device)
        self._runner = PlanRunner(
            self._model, self._state, self._groups, self.transport, self.clock, options, self._recorder
        )
        names = ModelNames.of(blocks, self._model.outlines, self._model.tied.names)
        runner, averages = self._runner, self._averages
        self._rank = RankTensors(self._model, self._state, self._groups, names, runner.steps, self._scale, averages)
        self.weights = EngineWeights(self._rank)
        self.saves = EngineSaves(self._rank, self._run_id, lambda: runner.accumulates)
        held, world, most = self._rank.held, self._groups.world, self.settings.max_skipped
        self._bad_steps = BadSteps(self._runner, self._model, self._state, held, world, most, spike_dir)

    def step(
        self, inputs: Any, targets: Any, *, microbatches: int | None = None, last: bool = True, **extras: Any
    ) -> StepResult:
        """Train on one batch: forward, backward, reduce, clip, and step the optimizer, as the plan says.

        Lengths and numbers of samples may differ from step to step, and from replica to replica. Samples are divided
        over microbatches as evenly as possible; with fewer samples than microbatches, the last ones have none.

        Args:
            inputs: this replica's samples (samples, …), whole sequences; may be None unless `needs_inputs`.
            targets: this replica's samples (samples, …); may be None unless `needs_targets`.
            microbatches: number of them in this step, on all ranks; None: as in the plan. For another number the plan
                is compiled and proved again, once; if no such plan exists, the last microbatches have no samples.
            last: False, on all ranks alike, accumulates gradients, and the next call adds to them. The numbers are
                those of one step on all samples, in the order of the calls; the result is that of this call.
            extras: inputs that any stage may need (positions, masks, …), (samples, …) on every rank.

        Raises:
            MisfitError: a batch that cannot be cut, ranks of one replica with different batches, or no samples at all.
            NotFiniteError: gradients of `max_skipped` steps in a row were not finite.
        """
        self.weights.require_steppable()
        plan = self.plan if microbatches is None else self._plans.training(microbatches)
        result = self._run(self._settle(plan, inputs, targets, extras, microbatches), last=last)
        if result.empty:
            raise MisfitError("no replica has samples in this step; end the loop, as `drained(loader, engine)` does")
        return result

    def no_more_data(self, each: Callable[[StepResult], object] | None = None) -> int:
        """Take part, without samples, in the steps of replicas that have more data; return the number of these steps.

        All ranks call this after their loops, and all return together. `each` is called with the result of every step,
        for work that the loop does after a step, such as stepping a learning rate scheduler.

        Raises `UsageError` before the first step.
        """
        if self._no_samples is None:
            raise UsageError("no_more_data follows a loop of steps, but this engine has not stepped yet")
        if self.num_replicas == 1:
            return 0
        self.weights.require_steppable()
        count = 0
        while not (result := self._run(self._settle(self.plan, *self._no_samples))).empty:
            count += 1
            if each is not None:
                each(result)
        return count

    def _run(self, step: PreparedStep, *, last: bool = True) -> StepResult:
        result = self._model.running(partial(self._runner.run, step, last=last))
        if last and not result.skipped and self._averages.all:
            self._averages.update()
        self._bad_steps.note(step, result, last=last)
        return result

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
        """Cut a batch into units, and agree with the other ranks on their shapes."""
        if self._is_closed:
            raise UsageError("this engine was closed; make a new one")
        with tensors_of_training() if torch.is_inference_mode_enabled() else NO_CONTEXT:
            try:
                if plan.mode == "train":
                    self.weights.require_unchanged()
                for source in self._model.sources:
                    source.follow()
                prepared = targets if targets is None or self._prepare is None else self._prepare(targets)
                batch = self._model.batches(plan, inputs, prepared, extras, microbatches, needs_loss=needs_loss)
            except (MisfitError, UsageError) as error:
                self._runner.refuse(plan, error)
                raise
            if self._no_samples is None:
                self._no_samples = without_samples(inputs), without_samples(targets), without_samples(dict(extras))
            self._model.publish(batch.kind, inputs, targets)
            return self._runner.prepare(plan, batch, partial(self._model.compare, plan, inputs, targets, extras))

    @property
    def usual_samples(self) -> int:
        """Number of samples for which a loss without a weight of its own weighs 1: at first, the largest microbatch.

        0 before the first step; a resumed run sets it to its earlier value.
        """
        return self._runner.usual_samples

    @usual_samples.setter
    def usual_samples(self, number: int) -> None:
        self._runner.usual_samples = number

    @property
    def loss_is_bare(self) -> bool:
        """Whether the loss function, as called on this rank, returned no weight of its own."""
        return self._runner.losses.loss.is_bare

    def save_trace(self, directory: str | Path) -> None:
        """Write start and end of each instruction of the traced steps on this rank (`quintsched render --trace`)."""
        if self._recorder is not None:
            self._recorder.save(Path(directory))

    def evaluate(
        self, inputs: Any, targets: Any, *, outputs: bool = False, microbatches: int | None = None, **extras: Any
    ) -> StepResult:
        """Run one batch forward only, with the blocks in evaluation mode; arguments as for `step`.

        With `outputs`, the result's `outputs` on ranks of the last stage are the last block's outputs for this
        replica's samples: one tree, whole over tp and cp; None on other ranks. Targets may then be None on all ranks:
        no loss is computed, and that of the result is NaN.
        """
        plan = self._plans.evaluation(microbatches)
        step = self._settle(plan, inputs, targets, extras, microbatches, needs_loss=not outputs)
        return self._model.evaluating(partial(torch.no_grad()(self._runner.run), step, wants_outputs=outputs))

    def busy_share(self, seconds: float) -> float:
        """Return the share of `seconds` in which ranks computed, over all of them, since the last call (collective).

        1 minus it is the measured bubble, including waits and all host time between instructions.
        """
        busy, all_seconds = self.everyone.add(self.clock.read_s(), seconds)
        return busy / all_seconds

    def verify(self, reference: nn.Module, inputs: Any, targets: Any, **extras: Any) -> Comparison:
        """Do a `step`, and compare it with the same step of a whole model in one process: see `EngineChecks.verify`."""
        return self.checks.verify(reference, inputs, targets, **extras)

    def inspect(self, inputs: Any, targets: Any, **extras: Any) -> ModelFacts:
        """Do a `step`, and return the facts found about blocks, loss and metrics, and what follows (collective)."""
        return self.checks.inspect(inputs, targets, **extras)

    def step_counting_saved(self, inputs: Any, targets: Any, **extras: Any) -> tuple[StepResult, SavedBytes]:
        """Do a `step`, and count the bytes that autograd saves for backwards, by storage and without weights."""
        return self.checks.step_counting_saved(inputs, targets, **extras)

    def saved_costs(self, counted: SavedBytes) -> Costs:
        """Return activation bytes of a unit of each stage, as counted on all ranks (collective): for `simulate`."""
        return counted.costs(self._groups.world)

    def close(self) -> None:
        """Close the transport; no step can follow."""
        self._is_closed = True
        self.transport.close()


def _as_split(settings: RunSettings, blocks: Split) -> RunSettings:
    """Return settings with the tensor rules and tied weights of a split model added."""
    tied = blocks.tied if settings.tied is None else settings.tied
    return settings.model_copy(update={"rules": {**settings.rules, **blocks.rules}, "tied": tied})


def _connect(plan: Plan, settings: RunSettings) -> Transport:
    watch = watch_by(settings)
    return connect_for(plan, watch.timeout_s, watch=watch)
