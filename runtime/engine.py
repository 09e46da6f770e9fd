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

from quintsched.check_call_arguments import (
    FUNCTION,
    MAPPING,
    NUMBER,
    PATH,
    PLAN,
    SEVERAL,
    WHOLE_NUMBER,
    ArgumentKind,
    called_as,
    items,
    ours,
    takes,
)
from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs

from .agreement.engine_settings_between_ranks import agree_on_functions
from .blocks.block_builders import Blocks
from .comm import Transport
from .engine_base import EngineBase
from .examine.block_examinations import BlockExaminations
from .interpreter.handler_table_and_loop import PreparedStep
from .interpreter.instruction_state import LossFn, MetricFn, RunOptions
from .interpreter.saved_activation_bytes import SavedBytes
from .interpreter.step_losses.sum_losses_across_ranks import StepResult
from .interpreter.trace_recorder import Recorder
from .optim.accepted_optimizer_forms import OptimizerGiven, builder_of
from .optim.loss_scale import LossScale
from .parallel.tensor.vocab_loss import takes_vocabulary
from .plan_requirements import require_mode, require_usable
from .run_checks.block_facts import ModelFacts
from .run_checks.compare_with_one_process import Comparison
from .run_checks.engine_checks import EngineChecks
from .run_checks.nonfinite_steps import BadSteps
from .saving.engine_methods.engine_saves import EngineState
from .settings.engine_settings import RunSettings, taking_settings
from .stage.early_stage_losses import for_slices

_METRIC = ArgumentKind("a name", lambda name: isinstance(name, str) and name not in ("loss", "weight"))
_COST = ArgumentKind("a number from 0", lambda cost: NUMBER.holds(cost) and cost >= 0)
_SETTINGS = ArgumentKind(
    "dtype=torch.bfloat16, or another floating-point dtype",
    lambda given: given.get("dtype") is None or getattr(given["dtype"], "is_floating_point", None) is True,
)


@taking_settings
class Engine(EngineBase, EngineState):
    """Runs a pipeline-parallel plan on the caller's blocks, loss and optimizer.

    Args:
        plan: a plan for training; it must be sound under the transport's profile.
        blocks: the model in order: modules, or functions without arguments that each build one (then a rank builds
            its own blocks alone, and `seed` fixes the initial weights for every mesh alike). A block takes the output
            of the block before and, by name, those of step's `extras` that its `forward` has parameters for; it
            returns its output, or (output, its own loss): a sum if the loss is (sum, weight) or a sum, else a mean.
            One that `parallelize_module` has sharded over tp, or `fully_shard` over all replicas, is left as it is.
        loss_fn: (output, targets) → the microbatch's loss, or (sum, weight) where samples or tokens weigh differently.
        optimizer: a function of parameters, a class, several, or an instance (`optim.accepted_optimizer_forms`).
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
        plan=PLAN,
        metrics=items("functions by names other than 'loss' and 'weight'", _METRIC, MAPPING),
        block_costs=items("a list of numbers from 0", _COST),
        trace_steps=items("whole numbers", WHOLE_NUMBER, SEVERAL),
        wants_stop=FUNCTION,
        spike_dir=PATH,
        transport=ours("Transport"),
        settings=_SETTINGS,
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
        require_mode(plan, "train", "Engine")
        max_sends = self._begin(plan, blocks, RunSettings.of_arguments(settings), block_costs, transport)
        metrics = metrics or {}
        given: dict[str, Callable[..., Any]] = {"loss_fn": loss_fn, **metrics}
        require_usable(self.plan, blocks, given)
        self._prepare, used_loss = for_slices(self.plan, loss_fn)
        builder, self._scale = builder_of(optimizer, blocks, self.settings.tied or {}), LossScale(grad_scaler)
        cut_logits = all(map(takes_vocabulary, (used_loss, *metrics.values())))
        self._agree_on_settings(blocks, {"metrics": [*metrics], "cut_logits": cut_logits})
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
            examine_blocks=BlockExaminations,
            shows_modules=any(isinstance(block, nn.Module) for block in blocks),
        )
        self._recorder = Recorder.from_plan(self.plan, self.transport, trace_steps)
        self._bind(blocks, options, self._recorder)
        held, world, most = self._rank.held, self._groups.world, self.settings.max_skipped
        self._bad_steps = BadSteps(self._runner, self._model, self._state, held, world, most, spike_dir)
        kept = self._model, self.masters, self._rank
        self.checks = EngineChecks(self._settle, self._runner, *kept, world, used_loss, self.settings.clip)

    @called_as("engine.step(inputs, targets)")
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
        if self._averages.all or not torch.is_grad_enabled():
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
        result = self._model.running(partial(self._runner.run_step, step, last=last))
        if last and not result.skipped and self._averages.all:
            self._averages.update()
        self._bad_steps.note_step(step, result, last=last)
        return result

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
            self._recorder.save_trace(Path(directory))

    @called_as("engine.evaluate(inputs, targets)")
    def evaluate(
        self, inputs: Any, targets: Any, *, outputs: bool = False, microbatches: int | None = None, **extras: Any
    ) -> StepResult:
        """Run one batch forward only, with the blocks in evaluation mode; arguments as for `step`.

        With `outputs`, the result's `outputs` on ranks of the last stage are the last block's outputs for this
        replica's samples: one tree, whole over tp and cp; None on other ranks. Targets may then be None on all ranks:
        no loss is computed, and that of the result is NaN.
        """
        return self._run_forward(inputs, targets, extras, microbatches, wants_outputs=outputs)

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
