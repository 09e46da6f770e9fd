"""The engine: a plan and a list of blocks are all it takes to train; the user keeps the loop.

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

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs

from .agreement.engine_records import agree_on_functions
from .blocks.blocks import Blocks
from .comm import Transport
from .engine_base import EngineBase
from .interpreter.activation_memory import SavedBytes
from .interpreter.interpreter import PreparedStep
from .interpreter.rank_state import LossFn, MetricFn, RunOptions
from .interpreter.recorder import Recorder
from .interpreter.tally import StepResult
from .optim.given import OptimizerGiven, builder_of
from .optim.loss_scale import LossScale
from .parallel.tensor.vocab_loss import takes_vocabulary
from .requirements import require_mode, require_usable
from .saving.verbs.engine_saves import EngineState
from .settings.run_settings import RunSettings, taking_settings
from .stage.sliced_losses import for_slices
from .verification.bad_steps import BadSteps
from .verification.block_facts import ModelFacts
from .verification.comparison import Comparison
from .verification.engine_checks import EngineChecks


@taking_settings
class Engine(EngineBase, EngineState):
    """Runs a plan on a user's own blocks, loss and optimizer.

    Args:
        plan: a plan for training; it must be sound under the transport's profile.
        blocks: the model in order: modules, or functions without arguments that each build one (then no rank builds
            the blocks of others, and `seed` fixes the initial weights for every mesh alike). A block takes the
            output of the one before and, by name, such of step's `extras` as its `forward` has parameters for; it
            returns its output, or (output, its own loss): a sum if the loss is (sum, weight) or a sum, else a mean.
            One that `parallelize_module` has sharded over tp, or `fully_shard` over all replicas, is left as it is.
        loss_fn: (output, targets) → the microbatch's loss, or (sum, weight) where samples or tokens weigh differently.
        optimizer: what steps the weights: a function of parameters, a class, several, an instance (see `optim.given`).
        metrics: name → function (output, targets) → a sum, divided by the batch's total weight.
        block_costs: what each block costs, in any unit; None estimates it. Stages are cut so that the slowest is as
            fast as can be; where the plan says how many blocks each has, that is what they get, and no costs.
        grad_scaler: says how losses are scaled, for fp16; the engine scales, unscales and updates by it.
        trace_steps: which steps, counted from 0, `save_trace` writes down; None: no trace.
        wants_stop: whether this rank is to stop after the step; where one says so, results of all are `stop_asked`.
        spike_dir: where the batch goes of the step after which `NotFiniteError` is raised; None: nowhere.
        transport: None takes NCCL or gloo under torchrun, and this process alone for a mesh of one rank.
        settings: by name, as `RunSettings` declares them:
            {settings}

    Raises:
        UnsoundError: the plan is not proved for the transport.
        MisfitError: world size, shapes or sizes do not fit the plan, or ranks disagree.
        StallError: a peer died or does not answer.
    """

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
        self._recorder = Recorder.of(self.plan, self.transport, trace_steps)
        self._bind(blocks, options, self._recorder)
        held, world, most = self._rank.held, self._groups.world, self.settings.max_skipped
        self._bad_steps = BadSteps(self._runner, self._model, self._state, held, world, most, spike_dir)
        kept = self._model, self.masters, self._rank
        self.checks = EngineChecks(self._settle, self._runner, *kept, world, used_loss, self.settings.clip)

    def step(
        self, inputs: Any, targets: Any, *, microbatches: int | None = None, last: bool = True, **extras: Any
    ) -> StepResult:
        """Train on one batch: forward, backward, reduce, clip, and step the optimizer, as the plan says.

        Lengths and numbers of samples may differ from step to step, and from replica to replica. Microbatches get as
        even numbers of samples as can be; of fewer samples, the last ones have none.

        Args:
            inputs: this replica's samples (samples, …), sequences whole; None will do unless `needs_inputs`.
            targets: this replica's samples (samples, …); None will do unless `needs_targets`.
            microbatches: how many there are in this step, on all ranks; None: as the plan says. For others the plan is
                compiled and proved again, once; of one that cannot be, the last have no samples.
            last: without it, on all ranks alike, gradients are kept, and the next call adds to them: the numbers are
                those of one step on all their samples, in the order of the calls; what is returned is this call's.
            extras: what every stage may need (positions, masks, …), (samples, …) on every rank.

        Raises:
            MisfitError: a batch that cannot be cut, a replica whose ranks get others, or no samples on any replica.
            NotFiniteError: gradients of `max_skipped` steps in a row were not finite.
        """
        self.weights.require_steppable()
        plan = self.plan if microbatches is None else self._plans.training(microbatches)
        result = self._run(self._settle(plan, inputs, targets, extras, microbatches), last=last)
        if result.empty:
            raise MisfitError("no replica has samples in this step; end the loop, as `drained(loader, engine)` does")
        return result

    def no_more_data(self, each: Callable[[StepResult], object] | None = None) -> int:
        """Take part, without samples, in the steps of replicas that have more data; return how many these were.

        All ranks call this behind their loops, and all return together. `each` is called with the result of every step,
        for what the loop does after a step, such as stepping a schedule of learning rates.

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

    @property
    def usual_samples(self) -> int:
        """For how many samples a loss weighs 1 that has no weight of its own: those of the largest microbatch at first.

        0 before the first step; a run that goes on sets it to what it was.
        """
        return self._runner.usual_samples

    @usual_samples.setter
    def usual_samples(self, number: int) -> None:
        self._runner.usual_samples = number

    @property
    def loss_is_bare(self) -> bool:
        """Whether the loss, where this rank has found it, had no weight of its own."""
        return self._runner.losses.loss.is_bare

    def save_trace(self, directory: str | Path) -> None:
        """Write down when each instruction of the traced steps ran on this rank (`quintsched render --trace`)."""
        if self._recorder is not None:
            self._recorder.save(Path(directory))

    def evaluate(
        self, inputs: Any, targets: Any, *, outputs: bool = False, microbatches: int | None = None, **extras: Any
    ) -> StepResult:
        """Run one batch forward only, with the blocks in evaluation mode; arguments as for `step`.

        With `outputs`, the result's `outputs` on ranks of the last stage are what the last block gives for this
        replica's samples: one tree, whole over tp and cp, None on other ranks. Targets may then be None on all ranks:
        no loss is found, and that of the result is not a number.
        """
        return self._run_forward(inputs, targets, extras, microbatches, wants_outputs=outputs)

    def verify(self, reference: nn.Module, inputs: Any, targets: Any, **extras: Any) -> Comparison:
        """Do a `step`, and compare it with the same step of a whole model in one process: see `EngineChecks.verify`."""
        return self.checks.verify(reference, inputs, targets, **extras)

    def inspect(self, inputs: Any, targets: Any, **extras: Any) -> ModelFacts:
        """Do a `step`, and return what it has found of blocks, loss and metrics, and what follows (collective)."""
        return self.checks.inspect(inputs, targets, **extras)

    def step_counting_saved(self, inputs: Any, targets: Any, **extras: Any) -> tuple[StepResult, SavedBytes]:
        """Do a `step`, and count the bytes that autograd saves for backwards: by storage, weights not included."""
        return self.checks.step_counting_saved(inputs, targets, **extras)

    def saved_costs(self, counted: SavedBytes) -> Costs:
        """Return what units of each stage hold, in bytes, as counted on all ranks (collective): for `simulate`."""
        return counted.costs(self._groups.world)
