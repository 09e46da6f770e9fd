"""The engine: a plan and a list of blocks are all it takes to train; the user keeps the loop.

engine = Engine(plan, blocks, loss_fn, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
for inputs, targets in loader:
    result = engine.step(inputs, targets)        # result.loss: a tensor, on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintsched.compiler import evaluation_of
from quintsched.errors import UsageError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.simulation.message_slots import MAX_SENDS

from .blocks.blocks import Blocks
from .blocks.shapes import agree
from .comm import Transport
from .comm.connection import connect_for
from .comm.control import ControlGroup
from .interchange.exchange import CheckpointFiles, Exchange
from .interchange.model_names import ModelNames
from .interpreter.activation_memory import SavedBytes
from .interpreter.clock import Clock
from .interpreter.plan_runner import PlanRunner, RunOptions
from .interpreter.rank_state import LossFn, MetricFn
from .interpreter.recorder import Recorder
from .interpreter.tally import StepResult
from .job.choices import ContextMethod, Proofs, ZeroSplit
from .optim.builds import OptimizerBuilds
from .optim.chained import LRSchedulers
from .optim.given import OptimizerGiven, builder_of
from .parallel.mesh_groups import MeshGroups, make_groups, open_channels
from .parallel.tensor.rules import Rules
from .parallel.tensor.vocab_loss import takes_vocabulary
from .requirements import (
    require_blocks_to_recompute,
    require_keyed_dropout,
    require_long_sight,
    require_loss_of_slices,
    require_movable_activations,
    require_runnable,
    require_usable,
)
from .splitting.split import Split
from .stage.build import Stage
from .stage.losses import for_slices
from .stage.rank_model import ModelOptions, RankModel
from .stage.tied_weights import with_ties
from .state.master_weights import Masters
from .state.memory_stats import StateBytes
from .state.training_state import TrainingState


class Engine(CheckpointFiles):
    """Runs a plan on a user's own blocks, loss and optimizer.

    Args:
        plan: a plan for training; it must be sound under the transport's profile.
        blocks: the model in order: modules, or functions without arguments that each build one (then no rank builds
            the blocks of others, and `seed` fixes the initial weights for every mesh alike). A block takes the
            output of the one before and, by name, such of step's `extras` as its `forward` has parameters for; it
            returns its output, or (output, auxiliary loss summed over the samples). One that `parallelize_module` has
            sharded over tp, or `fully_shard` over all replicas, is left as it is.
        loss_fn: (output, targets) → the microbatch's loss, or (sum, weight) where samples or tokens weigh differently.
        optimizer: what steps the weights: a function of parameters, a class, several, an instance (see `optim.given`).
        metrics: name → function (output, targets) → a sum, divided by the batch's total weight.
        clip: threshold of the global gradient norm.
        block_costs: what each block costs, in any unit; None estimates it. Stages are cut so that the slowest is as
            fast as can be; where the plan says how many blocks each has, that is what they get, and no costs.
        bucket_mb: gradients are reduced in buckets of at most this many megabytes.
        dtype: the floating-point type of weights and inputs; None leaves blocks as they are built. For bf16 and fp16
            the optimizer works on float32 masters, and gradients are added up in float32.
        context: how attention reaches over the slices of a sequence, where the mesh has cp.
        rules: which layers tensor parallelism cuts, and how, beyond its defaults: pattern on a name in the whole model
            ("3.attention.q", "*.head") to "column", "row", "vocabulary" or "replicate", or {"cut": "column", "parts":
            3} where outputs are fused blocks (see `parallel.tensor.rules`).
        prove: which blocks run once, cut beside whole, before the first step, where the mesh has tp or cp, or the plan
            slices: all that are not built in ("foreign"), "all", or "none" (see `parallel.proof`).
        sequence_parallel: whether tokens are sharded over tp between column/row pairs.
        tied: name → the weights that are one, "<block>.<name in the block>"; the plan ties the same names.
        compiled: whether torch.compile compiles each stage (collectives and products that are cut or put off stay out).
        zero_split: what of parameters ZeRO shares out: equal segments ("element"), whole parameters ("parameter"), or
            these for optimizers that work on them.
        trace_steps: which steps, counted from 0, `save_trace` writes down; None: no trace.
        transport: None takes NCCL or gloo under torchrun, and this process alone for a mesh of one rank.

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
        clip: float | None = None,
        block_costs: Sequence[float] | None = None,
        bucket_mb: float = 25.0,
        dtype: torch.dtype | None = None,
        context: ContextMethod = "ring",
        rules: Rules | None = None,
        prove: Proofs = "foreign",
        sequence_parallel: bool = False,
        tied: Mapping[str, Sequence[str]] | None = None,
        compiled: bool = False,
        zero_split: ZeroSplit = "auto",
        trace_steps: Collection[int] | None = None,
        seed: int = 0,
        transport: Transport | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if plan.mode != "train":
            raise UsageError(f"the engine trains, but the plan is for {plan.mode}; evaluation plans it makes itself")
        require_usable(blocks, {"loss_fn": loss_fn, **(metrics or {})})
        if isinstance(blocks, Split):
            rules, tied = {**(rules or {}), **blocks.rules}, blocks.tied if tied is None else tied
            plan = with_ties(plan, blocks, tied, block_costs)
        self.plan, self._evaluation_plan = plan, evaluation_of(plan)
        self.transport = transport or connect_for(plan, timeout_s)
        may_wait = require_runnable(plan, self.transport).profiles["blocking"]
        require_long_sight(plan, blocks)
        require_loss_of_slices(plan, loss_fn)
        self._prepare, loss_fn = for_slices(plan, loss_fn)
        builder = builder_of(optimizer, blocks)
        metrics = metrics or {}
        options = ModelOptions(
            block_costs=block_costs,
            dtype=dtype,
            context=context,
            rules=rules or {},
            prove=prove,
            sequence_parallel=sequence_parallel,
            cut_logits=all(map(takes_vocabulary, (loss_fn, *metrics.values()))),
            tied=tied or {},
            compiled=compiled,
            seed=seed,
        )
        self._groups = self._connect(context)
        self.everyone = ControlGroup(self._groups.world)
        self._model = self._set_up(blocks, options)
        self._state = TrainingState(
            plan,
            self._model.pp_rank,
            self.stages,
            self._groups,
            self._model.tied,
            OptimizerBuilds(builder, self._model, self._groups.tensor, zero_split),
            bucket_bytes=int(bucket_mb * 1e6),
        )
        self.clock = Clock(self.transport.device)
        self._recorder = self._make_recorder(trace_steps)
        bind_logits = self._model.tensor.bind
        run_options = RunOptions(
            loss_fn=bind_logits(loss_fn),
            metrics={name: bind_logits(metric) for name, metric in metrics.items()},
            clip=clip,
            max_sends=MAX_SENDS if may_wait else None,
        )
        self._runner = PlanRunner(
            self._model, self._state, self._groups, self.transport, self.clock, run_options, self._recorder
        )
        names = ModelNames.of(blocks, self._model.outlines, self._model.tied.names)
        self._exchange = Exchange(self._model, self._state, self._groups, names, self._runner.steps)

    def _connect(self, context: ContextMethod) -> MeshGroups:
        """Make the groups and the channels of the plan; all ranks must have the same plan."""
        groups = make_groups(self.plan, self.transport)
        open_channels([self.plan, self._evaluation_plan], self.transport, ring=context == "ring")
        agree("the plan", self.plan.to_json(), groups.world, self.transport.device)
        return groups

    def _set_up(self, blocks: Blocks, options: ModelOptions) -> RankModel:
        """Build this rank's stages."""
        model = RankModel(self.plan, blocks, self._groups, self.transport, options)
        require_keyed_dropout(self.plan, model.stages)
        require_blocks_to_recompute(self.plan, model.stages)
        require_movable_activations(self.plan, model.stages)
        return model

    def _make_recorder(self, trace_steps: Collection[int] | None) -> Recorder | None:
        if trace_steps is None:
            return None
        return Recorder(self.plan, self.transport.rank, self.transport.device, trace_steps)

    @property
    def stages(self) -> dict[int, Stage]:
        """This rank's stages: their blocks, as they are cut, by their numbers in the whole model."""
        return self._model.stages

    @property
    def optimizers(self) -> dict[tuple[int, ...], Optimizer]:
        """This rank's optimizers, each by the stages that it steps."""
        return self._state.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """This rank's optimizer; raises `UsageError` where the plan gives it none or several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise UsageError(f"this rank has {len(self.optimizers)} optimizers; use engine.optimizers")
        return next(iter(self.optimizers.values()))

    def lr_schedulers(self, make: Callable[[Optimizer], Any]) -> LRSchedulers:
        """Return a learning-rate scheduler for each of this rank's optimizers: `make` builds it.

        schedulers = engine.lr_schedulers(lambda optimizer: CosineAnnealingLR(optimizer, 1000)); then schedulers.step()
        """
        return LRSchedulers(make, self.optimizers.values())

    @property
    def zero_split(self) -> str | None:
        """What ZeRO gives to replicas as whole parameters, and how unevenly, in a line; None where that is nothing."""
        return self._state.zero_split

    @property
    def masters(self) -> Masters:
        """The weights that the optimizer works on, where they are not those that blocks compute with."""
        return self._state.masters

    @property
    def deferred_share(self) -> float | None:
        """Which share of the weights of stages with split backwards has gradients that wait; None without such."""
        return self._model.deferred_share

    @property
    def tensor_cuts(self) -> str | None:
        """What tensor parallelism cuts of the model and what stays whole, in a line; None without tp."""
        return self._model.tensor.report

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so has to be given inputs."""
        return self._model.needs_inputs

    @property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, or another that takes targets, and so has to be given them."""
        return self._model.needs_targets

    @property
    def num_replicas(self) -> int:
        """How many replicas divide the batch (dp x ep)."""
        return self._model.num_replicas

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self._model.replica

    def step(self, inputs: Any, targets: Any, **extras: Any) -> StepResult:
        """Train on one batch: forward, backward, reduce, clip, and step the optimizer, as the plan says.

        Args:
            inputs: this replica's samples (samples, …), sequences whole; needed where `needs_inputs`, else ignored.
            targets: this replica's samples (samples, …); needed where `needs_targets`, else ignored.
            extras: what every stage may need (positions, masks, …), (samples, …) on every rank.

        Raises:
            MisfitError: samples that do not divide by the microbatches, or shapes other than in the first step.
        """
        return self._runner.run(self.plan, self._model.batch(self.plan, inputs, self._prepare(targets), extras))

    def step_counting_saved(self, inputs: Any, targets: Any, **extras: Any) -> tuple[StepResult, SavedBytes]:
        """Do a `step`, and count the bytes that autograd saves for backwards: by storage, weights not included."""
        batch = self._model.batch(self.plan, inputs, self._prepare(targets), extras)
        interpreter = self._runner.interpreter_of(self.plan, batch)
        with SavedBytes(interpreter.state, self.stages, batch) as counted:
            result = self._runner.run(self.plan, batch, interpreter.watched(counted))
        return result, counted

    def saved_costs(self, counted: SavedBytes) -> Costs:
        """Return what units of each stage hold, in bytes, as counted on all ranks (collective): for `simulate`."""
        return counted.costs(self._groups.world, self.transport.device)

    def save_trace(self, directory: str | Path) -> None:
        """Write down when each instruction of the traced steps ran on this rank (`quintsched render --trace`)."""
        if self._recorder is not None:
            self._recorder.save(Path(directory))

    def evaluate(self, inputs: Any, targets: Any, *, outputs: bool = False, **extras: Any) -> StepResult:
        """Run one batch forward only, with the blocks in evaluation mode; arguments as for `step`.

        With `outputs`, the result's `outputs` on ranks of the last stage are what the last block gives for this
        replica's samples: one tree, whole over tp and cp, None on other ranks. Targets may then be None on all ranks:
        no loss is found, and that of the result is not a number.
        """
        prepared = None if targets is None else self._prepare(targets)
        batch = self._model.batch(self._evaluation_plan, inputs, prepared, extras, needs_loss=not outputs)
        self._runner.interpreter_of(self._evaluation_plan, batch)
        with self._model.evaluating(), torch.no_grad():
            return self._runner.run(self._evaluation_plan, batch, wants_outputs=outputs)

    def busy_share(self, seconds: float) -> float:
        """Return the share of `seconds` in which ranks computed, over all of them, since the last call (collective).

        1 minus it is the measured bubble, waits and everything between instructions included.
        """
        busy, all_seconds = self.everyone.add(self.clock.read_s(), seconds)
        return busy / all_seconds

    def expert_tokens(self) -> dict[str, Tensor]:
        """Return how often each expert was chosen in training since the last call, on every rank (collective).

        Per mixture of experts, by its name in the whole model: (experts,), int64, over the whole batches.
        """
        return self._model.expert_load.read()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards: weights as "model.<name>", optimizer state as "optimizer.<name>.<key>".

        Beside them "engine.step" says how many steps were made, which the masks of dropouts depend on.
        """
        step = torch.tensor(self._runner.steps.total)
        return {**self._state.read(), "engine.step": step}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave here on the same mesh (collective with ZeRO); else raises `MisfitError`."""
        self._state.load(state)
        steps = self._runner.steps
        steps.before = int(state.get("engine.step", 0)) - steps.in_run

    def full_weights(self) -> dict[str, Tensor]:
        """Return the full weights of this rank's blocks (collective over tp, and replicas that hold shards).

        With ZeRO-3 the blocks themselves show them only while a step uses them.
        """
        return self._state.full_weights()

    def state_bytes(self) -> StateBytes:
        """Return the most bytes of weights, gradients and optimizer state on this rank since the last call."""
        return self._state.read_bytes()

    def close(self) -> None:
        """Hang up; no step can follow."""
        self.transport.close()
