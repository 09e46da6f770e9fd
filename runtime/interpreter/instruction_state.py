"""State of one rank's instructions, split into views by instruction kind.

    Fwd, Bwd, BwdInput, BwdWeight, Recompute        ComputeState     stages, saved activations, the tally, gradients
    OffloadAct, FetchAct                              its `moved`    saved activations that leave the rank's memory
    SendAct, RecvAct, SendGrad, RecvGrad, …         MessageState     transport, shapes of messages, sends in flight
    LendAct, HoldAct, ReturnAct, ReclaimAct         RunState         `moved`, and the transport of messages
    AllReduceBucket, ClipGrad, OptStep, …           StepEndState     gradients, optimizers, the tally
    GatherParams, FreeParams, AllGatherBucket       ZeroState        sharded weights, gradients

Activations and gradients pass through `ValueCells`, what a forward saves through `saved`; all run the `CurrentStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.ir.instruction_values import Value

from ..autograd.autograd_engine_call import Root, edge_of
from ..autograd.deferred_weight_grads import Products, WeightQueue
from ..autograd.recompute import Rerun
from ..autograd.slice_kv_cache import Store
from ..comm import Group, Transport, Work
from ..comm.overlap_order import Overlaps
from ..comm.overlap_threads import BoundCall
from ..losses.weighted_losses import WeighedLoss
from ..losses.weighted_metrics import WeighedMetric
from ..optim.loss_scale import LossScale
from ..optim.step_on_gathered_matrices import Stepper
from ..parallel.mesh_groups import MeshGroups
from ..parallel.mesh_independent_dropout import MaskUnit
from ..settings.engine_settings import RunSettings
from ..stage.batches.microbatches import NO_BATCH, Batch
from ..stage.batches.same_batch_every_step import DataMarks
from ..stage.rank_stages import RankModel
from ..stage.stage_forward import Outputs, StageForward
from ..stage.stage_input_gradients import BoundaryGradients
from ..step_setup.block_examination_results import BlockFindings
from ..step_setup.unit_samples import NO_UNITS, Units, UnitShape
from ..weights_and_gradients.master_weights import Masters
from ..weights_and_gradients.training_state import GradientHandling
from ..weights_and_gradients.zero_shards import ShardedWeights
from .busy_clock import Clock
from .handlers.calls_bound_to_shapes import UnitCall, bound
from .offload_instructions import MovedActivations
from .program_dataflow import ProgramFlow
from .step_losses.sum_losses_across_ranks import StepFigures, Tally
from .values_between_instructions import ReceiveBuffers, ValueCell, ValueCells, Waits

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
MetricFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Loss, metrics and settings that a run applies to a model's outputs and gradients."""

    loss_fn: LossFn
    metrics: Mapping[str, MetricFn]
    settings: RunSettings
    scale: LossScale
    """The loss scale: losses are multiplied by it for their backwards."""
    max_sends: int | None
    """Maximum number of sends in flight per channel; None: any number."""
    wants_stop: Callable[[], bool]
    examine_blocks: Callable[[RankModel, MeshGroups], BlockFindings] = lambda model, groups: BlockFindings()
    """Returns the examinations of a rank's blocks; by default there are none."""
    shows_modules: bool = False
    """Whether the user's loop has the modules, and may read their weights whenever a step has returned."""
    finds_loss: bool = True
    """Whether the loss and the metrics are called; a forward engine, which returns outputs alone, calls neither."""

    @property
    def functions(self) -> dict[str, Any]:
        """User functions other than blocks (the loss, metrics), by their names in messages."""
        return {"the loss function": self.loss_fn, **{f"metric {name!r}": m for name, m in self.metrics.items()}}


NO_CONTEXT = nullcontext()
"""A null context, which may be entered any number of times."""

ONLY = (0,)
"""`places` of roots where a stage has one output, which requires a gradient; compared by identity, as a fast path."""


BackwardRoots = tuple[tuple[Root, ...], tuple[int, ...], tuple[Tensor, ...]]
"""Arguments of a backward: (roots, places, loss gradients).

`roots` are autograd edges: first those of outputs, whose gradients come from the next stage, then those of losses.
`places` are the indices of the former among the stage's outputs; the gradient of a loss is its factor x the loss scale.
"""

NO_ROOTS: BackwardRoots = (), (), ()


def root_gradients(places: Sequence[int], of_losses: Outputs, of_outputs: Outputs) -> Outputs:
    """Return the gradients of all roots, given those of the stage's outputs; see `BackwardRoots`."""
    return (*[of_outputs[place] for place in places], *of_losses) if places else of_losses


def with_loss_root(start: BackwardRoots, loss: Tensor, scale: LossScale) -> BackwardRoots:
    """Return the roots of a backward, and `loss` after them if it requires a gradient."""
    if not loss.requires_grad:
        return start
    roots, places, of_losses = start
    return (*roots, edge_of(loss)), places, (*of_losses, scale.gradient_of(loss, 1.0))


SavedForward = tuple[Outputs, BackwardRoots, list[Rerun], MaskUnit | None]
"""State that a forward saves for its backward: (inputs, roots, reruns of recomputed blocks, key of random draws).

The key is None where no block draws.
"""


@dataclass
class CurrentStep:
    """The batch that is run and its units.

    Attributes:
        batch, units: the batch, cut into units, and their samples and shapes.
        number: number of training steps made before, including those of the run that this one resumes.
        runs: number of runs of this program so far, this one included.
        last: whether gradients are complete after the batch; False: the next batch adds to them.
        samples_before: number of samples of the earlier batches of an accumulated step.
        outputs: the last block's output for each unit; None: not asked for.
    """

    batch: Batch = NO_BATCH
    units: Units = NO_UNITS
    number: int = 0
    runs: int = 0
    last: bool = True
    samples_before: int = 0
    outputs: dict[int, Any] | None = None

    def unless_empty(
        self,
        unit: int,
        call: BoundCall,
        otherwise: BoundCall | None = None,
        *,
        without_samples: BoundCall | None = None,
    ) -> BoundCall:
        """Return a call that makes `call`; for a unit that is skipped (`Units.empty`), it makes `otherwise`, or none.

        A unit without samples is not skipped where replicas communicate within forwards (experts, synced norms, …):
        then `without_samples`, if it is given, is called in place of `call`.
        """

        def run() -> None:
            if unit not in self.units.empty:
                (call if without_samples is None or self.units.samples[unit] else without_samples)()
            elif otherwise is not None:
                otherwise()

        def bind(units: Units) -> BoundCall | None:
            if unit in units.empty:
                return otherwise
            return bound(call, units) if without_samples is None or units.samples[unit] else without_samples

        found = UnitCall(run)
        found.bind = bind
        return found


@dataclass(frozen=True)
class ComputeState:
    """State of forwards and backwards.

    Attributes:
        shape: shape of the units that the program was bound for.
        forwards: runs the blocks of each stage.
        token_shards: per stage, the number of ranks of tp over which its input tokens are sharded.
        usual_samples: number of samples of a microbatch that weighs 1, where its loss comes without a weight.
        queues: per stage with split backwards, collects the deferred products of weight gradients.
        moved: the saved activations that leave the rank's memory.
        boundaries: which stages' inputs need gradients, and have received them.
        detect_changes: called after each forward to detect changes that must not occur within a step; None: no check.
        saved: from a forward to its backward.
        pending: from a `BwdInput` to its `BwdWeight`.
        stores: keys and values of all slices, until the backward of the first one; by (stage, microbatch).
    """

    flows: ProgramFlow
    current: CurrentStep
    cells: ValueCells
    clock: Clock
    tally: Tally
    forwards: Mapping[int, StageForward]
    shape: UnitShape
    token_shards: Mapping[int, int]
    usual_samples: int
    device: torch.device
    loss_fn: WeighedLoss
    scale: LossScale
    metrics: Mapping[str, WeighedMetric]
    gradients: GradientHandling
    queues: Mapping[int, WeightQueue]
    moved: MovedActivations
    boundaries: BoundaryGradients
    overlaps: Overlaps
    detect_changes: Callable[[], None] | None
    saved: dict[Value, SavedForward] = field(default_factory=dict)
    pending: dict[Value, Products] = field(default_factory=dict)
    stores: dict[tuple[int, int], Store] = field(default_factory=dict)

    def store_key(self, stage: int, unit: int) -> tuple[int, int]:
        """Return the key in `stores` of the keys and values of a unit's microbatch: (stage, microbatch)."""
        return stage, unit // self.flows.plan.schedule.slices


def stage_forwards(
    model: RankModel, flows: ProgramFlow, shape: UnitShape, current: CurrentStep, require_first: Callable[..., None]
) -> dict[int, StageForward]:
    """Return the forward of each stage of a rank; `require_first` (mode, number, block) is called for block losses."""
    return {
        number: StageForward(
            {int(block): module for block, module in stage.blocks.items()},
            model.cuts[number].start,
            shape.cargo.of_stage(number),
            masks=model.masks,
            inputs=shape.spec.inputs,
            input_tree=lambda: current.batch.input_tree,
            skips=flows.plan.skips,
            recompute=flows.plan.layout.recompute_every(number) if flows.trains else 0,
            compiled=model.options.compiled,
            around=model.tensor.tokens.around,
            sliced=model.tensor.tokens.group_of,
            beside=model.synced,
            begins=partial(require_first, flows.plan.mode),
        )
        for number, stage in model.stages.items()
    }


class BoundReceive(NamedTuple):
    """Receive, at index `number` of the program, bound to buffers for a shape; out of date by another `generation`."""

    number: int
    cell: ValueCell
    shape: UnitShape
    generation: int
    tensors: Outputs
    post: Callable[[], Work]


@dataclass(frozen=True)
class MessageState:
    """State of sends and receives.

    Attributes:
        shape: shape of the units that the program was bound for.
        max_sends: limit of sends in flight per channel; None: any number.
        buffers: shared by all plans of a rank, as they run one after the other.
    """

    flows: ProgramFlow
    current: CurrentStep
    cells: ValueCells
    shape: UnitShape
    transport: Transport
    max_sends: int | None
    buffers: ReceiveBuffers


@dataclass
class StepOutcome:
    """Outcome of a step.

    Attributes:
        norm: returns the global norm of the gradient; None: not computed.
        skipped: whether the gradient was not finite, so that the optimizer does not step.
        empty: whether it was skipped because no replica has samples.
        stop_asked: whether a rank was asked to stop after this step.
    """

    norm: Callable[[], Tensor] | None = None
    skipped: bool = False
    empty: bool = False
    stop_asked: bool = False


@dataclass(frozen=True)
class StepEndState:
    """State of the instructions that end a step.

    Attributes:
        steppers: the optimizer's step for each `OptStep`, by its stages.
        clip: the maximum global norm; None: no clipping.
        data_digests: digests of the ranks' batches, which are reduced with the norm.
        settle_loss: has ranks agree on what the loss is a mean over (samples, tokens, …), before the optimizer steps.
        earlier: the figures of the accumulated step's earlier batches.
    """

    waits: Waits
    tally: Tally
    metrics_group: Group
    gradients: GradientHandling
    masters: Masters
    steppers: Mapping[tuple[int, ...], Stepper]
    clip: float | None
    scale: LossScale
    data_digests: DataMarks
    settle_loss: Callable[..., None]
    earlier: list[StepFigures]
    outcome: StepOutcome = field(default_factory=StepOutcome)


@dataclass(frozen=True)
class ZeroState:
    """State of the ZeRO instructions; without ZeRO `weights` are empty."""

    waits: Waits
    weights: ShardedWeights
    gradients: GradientHandling


@dataclass(frozen=True)
class RunState:
    """One rank's state while it runs a program; each handler is bound to its own view of it.

    The views share `flows`, `current`, `cells` and `waits`.
    """

    flows: ProgramFlow
    current: CurrentStep
    cells: ValueCells
    waits: Waits
    compute: ComputeState
    messages: MessageState
    step_end: StepEndState
    zero: ZeroState

    def begin_step(self, batch: Batch) -> None:
        """Start a step on `batch`."""
        self.compute.clock.begin_step()
        self.cells.release_sends()
        self.current.batch = batch
        accumulates = self.flows.trains and not self.current.last
        self.compute.tally.begin_step(alone=accumulates)
        if self.compute.moved.moves_some:
            self.compute.moved.begin_step()
        outcome = self.step_end.outcome
        outcome.norm, outcome.skipped, outcome.empty, outcome.stop_asked = None, False, False, False
        if self.flows.trains:
            self.compute.gradients.reducer.accumulates = accumulates
            self.compute.gradients.reducer.begin_step(self.compute.tally.piggybacked)

    def end_step(self) -> None:
        """End the step: drop its batch."""
        self.current.batch = NO_BATCH
