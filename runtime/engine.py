"""The engine: a plan and a list of blocks are all it takes to train; the user keeps the loop.

engine = Engine(plan, blocks, loss_fn, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
for inputs, targets in loader:
    result = engine.step(inputs, targets)        # result.loss: a tensor, on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintsched.compiler import evaluation_of
from quintsched.errors import UsageError
from quintsched.ir.instructions import BwdInput
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs

from .autograd.deferred_weight_grads import WeightQueue, defer_weights
from .blocks.blocks import Blocks, TensorSpec, estimate_costs, outlines
from .blocks.shapes import agree, find_shapes, tell_spec
from .comm import Transport
from .comm.connection import connect_for
from .comm.control import Everyone
from .interpreter.activation_memory import SavedBytes
from .interpreter.interpreter import Interpreter
from .interpreter.rank_state import SENDS_KEPT, Clock, LossFn, Machine, MetricFn, Tally
from .interpreter.recorder import Recorder
from .interpreter.step_result import StepResult
from .parallel.context.context import ContextMethod, ContextParallel
from .parallel.dropout import Masks
from .parallel.expert.load import ExpertLoad
from .parallel.expert.moe import leave_uncompiled
from .parallel.mesh_groups import make_groups, open_channels
from .parallel.tensor.model_cuts import TensorCuts
from .requirements import (
    require_blocks_to_recompute,
    require_keyed_dropout,
    require_long_sight,
    require_runnable,
)
from .stage.build import build_stages, cut, require_separate
from .stage.forward import StageForward
from .stage.microbatches import Batch, BatchCutter
from .stage.tied_weights import TiedWeights
from .state.memory_stats import StateBytes
from .state.optimizers import OptimizerFn
from .state.training_state import TrainingState
from .train.losses import takes_vocabulary


class Engine:
    """Runs a plan on a user's own blocks, loss and optimizer.

    Args:
        plan: a plan for training; it must be sound under the transport's profile.
        blocks: the model in order: modules, or functions without arguments that each build one (then no rank builds
            the blocks of others, and `seed` fixes the initial weights for every mesh alike). A block takes the
            output of the one before and, by name, such of step's `extras` as its `forward` has parameters for; it
            returns its output, or (output, auxiliary loss summed over the samples). One that `parallelize_module` has
            sharded over tp, or `fully_shard` over all replicas, is left as it is.
        loss_fn: (output, targets) → the microbatch's loss, or (sum, weight) where samples or tokens weigh differently.
        optimizer: parameters → optimizer; where its parameter's name begins with "named", it gets (name, parameter)
            pairs. With ZeRO these are segments of one dimension of the parameters that they are named after.
        metrics: name → function (output, targets) → a sum, divided by the batch's total weight.
        clip: threshold of the global gradient norm.
        block_costs: what each block costs, in any unit; None estimates it. Stages are cut so that the slowest is as
            fast as can be.
        bucket_mb: gradients are reduced in pieces of at most this many megabytes.
        dtype: the floating-point type of weights and inputs; None leaves blocks as they are built. For bf16 and fp16
            the optimizer works on float32 masters, and gradients are added up in float32.
        context: how attention reaches over the parts of a sequence, where the mesh has cp.
        rules: which layers tensor parallelism cuts, and how, beyond its defaults: pattern on a name in the whole model
            ("3.attention.q", "*.head") to "column", "row", "vocabulary" or "replicate" (see `split_rules`).
        sequence_parallel: whether each rank of tp has a share of the tokens between column/row pairs.
        tied: name → the weights that are one, "<block>.<name in the block>"; the plan ties the same names.
        compiled: whether torch.compile compiles each stage (collectives and products that are cut or put off stay out).
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
        optimizer: OptimizerFn,
        *,
        metrics: Mapping[str, MetricFn] | None = None,
        clip: float | None = None,
        block_costs: Sequence[float] | None = None,
        bucket_mb: float = 25.0,
        dtype: torch.dtype | None = None,
        context: ContextMethod = "ring",
        rules: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        tied: Mapping[str, Sequence[str]] | None = None,
        compiled: bool = False,
        trace_steps: Collection[int] | None = None,
        seed: int = 0,
        transport: Transport | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if plan.mode != "train":
            raise UsageError(f"the engine trains, but the plan is for {plan.mode}; evaluation plans it makes itself")
        self.plan, self._evaluation_plan = plan, evaluation_of(plan)
        self._dtype, self._clip, self._compiled = dtype, clip, compiled
        self.transport = transport or connect_for(plan, timeout_s)
        self._rank = self.transport.rank
        self._pp_rank = plan.mesh.coordinates(self._rank).get("pp", 0)
        require_runnable(plan, self.transport)
        require_long_sight(plan, blocks)
        self._connect(context)
        cut_logits = all(map(takes_vocabulary, (loss_fn, *(metrics or {}).values())))
        self._plan_cuts(blocks, block_costs, rules or {}, sequence_parallel=sequence_parallel, cut_logits=cut_logits)
        self._build(blocks, seed)
        self._loss_fn = self._tensor.told(loss_fn)
        self._metrics = {name: self._tensor.told(metric) for name, metric in (metrics or {}).items()}
        self._tied = TiedWeights(plan, tied or {}, self._cuts, self.stages, self._groups)
        self._queues, self.deferred_share = self._defer()
        self._state = TrainingState(
            plan, self._pp_rank, self.stages, self._groups, self._tied, optimizer, piece_bytes=int(bucket_mb * 1e6)
        )
        self.optimizers, self.masters = self._state.optimizers, self._state.masters
        self._recorder = None if trace_steps is None else Recorder(plan, self._rank, self.transport.device, trace_steps)
        self._num_steps = self._steps_before = 0
        self._broken = False
        self._running: Interpreter | None = None
        self._training: Interpreter | None = None
        self._evaluation: Interpreter | None = None

    def _connect(self, context: ContextMethod) -> None:
        """Make the groups and the channels of the plan; all ranks must have the same plan."""
        plan = self.plan
        self._sends_kept = SENDS_KEPT if plan.check(profile="tagged").profiles["blocking"] else None
        self._groups = make_groups(plan, self.transport)
        self._sequences = ContextParallel(context, self._groups.context, self.transport, self._compiled)
        self.everyone = Everyone(self._groups.world)
        open_channels([plan, self._evaluation_plan], self.transport, ring=context == "ring")
        agree("the plan", plan.to_json(), self._groups.world, self.transport.device)

    def _plan_cuts(
        self,
        blocks: Blocks,
        block_costs: Sequence[float] | None,
        rules: Mapping[str, str],
        *,
        sequence_parallel: bool,
        cut_logits: bool,
    ) -> None:
        """Settle which blocks are a stage, and how tensor parallelism cuts them, before any is built."""
        if block_costs is not None and len(block_costs) != len(blocks):
            raise UsageError(f"there are {len(block_costs)} block_costs for {len(blocks)} blocks")
        self._cuts = cut(estimate_costs(blocks) if block_costs is None else block_costs, self.plan.layout)
        tensor = self._groups.tensor
        require_separate(blocks, self._cuts, tensor)
        self._outlines = outlines(blocks, apart=tensor.size > 1)
        self._tensor = TensorCuts(
            self._outlines, tensor, rules, sequence_parallel=sequence_parallel, cut_logits=cut_logits
        )

    def _build(self, blocks: Blocks, seed: int) -> None:
        """Build this rank's stages, and what serves them their batches and their random numbers."""
        device = self.transport.device
        self._masks = Masks(seed)
        self.stages = build_stages(
            blocks,
            self._cuts,
            self.plan.layout,
            self._pp_rank,
            self._groups,
            self._tensor,
            seed=seed,
            masks=self._masks,
            dtype=self._dtype,
            device=device,
        )
        require_keyed_dropout(self.plan, self.stages)
        require_blocks_to_recompute(self.plan, self.stages)
        if self._compiled:
            leave_uncompiled(self.stages)
        self._expert_load = ExpertLoad(blocks, self.stages, self._groups, device)
        self.clock = Clock(device)
        self._cut = BatchCutter(
            device,
            self._dtype,
            inputs=self.needs_inputs,
            targets=self.needs_targets,
            rank=self._rank,
            shard=self._sequences.shard,
        )

    def _defer(self) -> tuple[dict[int, WeightQueue], float | None]:
        """Let the weight gradients of stages with split backwards wait; return also the share of weights that can."""
        split = {i.stage for i in self.plan.programs[self._pp_rank] if isinstance(i, BwdInput)}
        queues = {stage: WeightQueue(compiled=self._compiled) for stage in split}
        waiting = sum(defer_weights(self.stages[stage], queue) for stage, queue in queues.items())
        total = sum(p.numel() for stage in split for p in self.stages[stage].named_weights().values())
        return queues, waiting / total if total else None

    @property
    def optimizer(self) -> Optimizer:
        """This rank's optimizer; raises `UsageError` where the plan gives it none or several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise UsageError(f"this rank has {len(self.optimizers)} optimizers; use engine.optimizers")
        return next(iter(self.optimizers.values()))

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so has to be given inputs."""
        return any(route.stages[0] in self.stages for route in self.plan.routes)

    @property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, and so has to be given targets."""
        return any(route.stages[-1] in self.stages for route in self.plan.routes)

    @property
    def num_replicas(self) -> int:
        """Into how many shares the batch is divided (dp x ep)."""
        return self.plan.mesh.axis_size("dp") * self.plan.mesh.axis_size("ep")

    @property
    def replica(self) -> int:
        """Which share of the batch this rank takes."""
        where = self.plan.mesh.coordinates(self._rank)
        return where.get("dp", 0) * self.plan.mesh.axis_size("ep") + where.get("ep", 0)

    def step(self, inputs: Tensor | None, targets: Tensor | None, **extras: Tensor) -> StepResult:
        """Train on one batch: forward, backward, reduce, clip, and step the optimizer, as the plan says.

        Args:
            inputs: this replica's share (samples, …), sequences whole; needed where `needs_inputs`, else ignored.
            targets: this replica's share (samples, …); needed where `needs_targets`, else ignored.
            extras: what every stage may need (positions, masks, …), (samples, …) on every rank.

        Raises:
            MisfitError: samples that do not divide by the microbatches, or shapes other than in the first step.
        """
        batch = self._cut(self.plan, inputs, targets, extras)
        result = self._run(self._trainer(batch), batch)
        self._num_steps += 1
        return result

    def _trainer(self, batch: Batch) -> Interpreter:
        if self._training is None:
            self._training = self._resolve(self.plan, batch)
        return self._training

    def step_counting_saved(
        self, inputs: Tensor | None, targets: Tensor | None, **extras: Tensor
    ) -> tuple[StepResult, SavedBytes]:
        """Do a `step`, and count the bytes that autograd saves for backwards: by storage, weights not included."""
        batch = self._cut(self.plan, inputs, targets, extras)
        interpreter = self._trainer(batch)
        counted = SavedBytes(interpreter.machine, self.stages, batch)
        with counted:
            result = self._run(interpreter, batch, interpreter.watched(counted))
        self._num_steps += 1
        return result, counted

    def saved_costs(self, counted: SavedBytes) -> Costs:
        """Return what units of each stage hold, in bytes, as counted on all ranks (collective): for `simulate`."""
        return counted.costs(self._groups.world, self.transport.device)

    def save_trace(self, directory: str | Path) -> None:
        """Write down when each instruction of the traced steps ran on this rank (`quintsched render --trace`)."""
        if self._recorder is not None:
            self._recorder.save(Path(directory))

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, **extras: Tensor) -> StepResult:
        """Run one batch forward only, with the blocks in evaluation mode; arguments as for `step`."""
        batch = self._cut(self._evaluation_plan, inputs, targets, extras)
        if self._evaluation is None:
            self._evaluation = self._resolve(self._evaluation_plan, batch)
        trained = [module for stage in self.stages.values() for module in stage.modules() if module.training]
        try:
            for stage in self.stages.values():
                stage.eval()
            with torch.no_grad():
                return self._run(self._evaluation, batch)
        finally:
            for module in trained:
                module.training = True

    def _run(self, interpreter: Interpreter, batch: Batch, calls: list[Callable[[], None]] | None = None) -> StepResult:
        machine = interpreter.machine
        if self._broken:
            raise UsageError("an earlier step failed half-way, so gradients and messages are lost; make a new engine")
        for unit in batch.inputs[:1]:
            machine.require_input(unit)
        if self._running is not None and self._running is not interpreter:
            self._running.machine.settle()
        self._running, self._broken = interpreter, True
        machine.step = self._steps_before + self._num_steps
        interpreter.run(batch, self._num_steps, calls)
        self._broken = False
        assert machine.sums is not None
        assert machine.shared is not None
        return StepResult(machine.sums, machine.shared, tuple(self._metrics), machine.norm, machine.skipped)

    def _resolve(self, plan: Plan, batch: Batch) -> Interpreter:
        """Agree on shapes with the other ranks, and bind the plan's program to this rank's machine."""
        device = self.transport.device
        source = plan.layout.rank_of(plan.routes[0].stages[0])
        own = TensorSpec.of(batch.inputs[0]) if self._pp_rank == source else None
        inputs = tell_spec(own, source, self._groups.pipeline, device)
        shapes = find_shapes(self._outlines, inputs, batch.extras[0], self._dtype, self._groups.world, device)
        tokens = self._tensor.tokens
        parcels = tokens.travelling(shapes)
        trains = plan.mode == "train"
        machine = Machine(
            plan=plan,
            pp_rank=self._pp_rank,
            forwards={
                number: StageForward(
                    {int(block): module for block, module in stage.blocks.items()},
                    parcels,
                    masks=self._masks,
                    recompute=plan.layout.recompute_every(number) if trains else 0,
                    compiled=self._compiled,
                    around=tokens.around,
                )
                for number, stage in self.stages.items()
            },
            input_spec=inputs,
            parcels={stage: parcels[blocks.stop - 1] for stage, blocks in enumerate(self._cuts)},
            transport=self.transport,
            groups=self._groups,
            clock=self.clock,
            loss_fn=self._loss_fn,
            metrics=self._metrics,
            tally=Tally(len(self._metrics), device),
            gradients=self._state.gradients,
            queues=self._queues,
            masters=self.masters,
            weights=self._state.weights,
            optimizers=self.optimizers,
            clip=self._clip,
            sends_kept=self._sends_kept,
            context=self._sequences.context_of(inputs),
            token_parts={stage: tokens.parts_before(blocks.start) for stage, blocks in enumerate(self._cuts)},
            replica=self.replica,
        )
        return Interpreter(machine, self._rank, self._recorder if trains else None)

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
        return self._expert_load.read()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards: weights as "model.<name>", optimizer state as "optimizer.<name>.<key>".

        Beside them "engine.step" says how many steps were made, which the masks of dropouts depend on.
        """
        step = torch.tensor(self._steps_before + self._num_steps)
        return {**self._state.read(), "engine.step": step}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave here on the same mesh (collective with ZeRO); else raises `MisfitError`."""
        self._state.load(state)
        self._steps_before = int(state.get("engine.step", 0)) - self._num_steps

    def load_pretrained(self, path: str | Path) -> None:
        """Let the weights be those of a GPT-2-shaped checkpoint, of which each rank reads its own slices.

        It is meant for an engine that has not stepped yet: the optimizer's state stays. See `pretrained` for what a
        checkpoint is, and for what is raised.
        """
        self._state.load_pretrained(path, num_blocks=len(self._outlines))

    def full_weights(self) -> dict[str, Tensor]:
        """Return the whole weights of this rank's blocks (collective over tp, and replicas that share out state).

        With ZeRO-3 the blocks themselves show them only while a step uses them.
        """
        return self._state.full_weights()

    def state_bytes(self) -> StateBytes:
        """Return the most bytes of weights, gradients and optimizer state on this rank since the last call."""
        return self._state.read_bytes()

    def close(self) -> None:
        """Hang up; no step can follow."""
        self.transport.close()
