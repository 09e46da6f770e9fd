"""State of one rank's instructions, split into views by instruction kind.

    Fwd, Bwd, BwdInput, BwdWeight, Recompute        ComputeState     stages, saved activations, the tally, gradients
    OffloadAct, FetchAct                              its `moved`    saved activations that leave the rank's memory
    SendAct, RecvAct, SendGrad, RecvGrad            MessageState     transport, shapes of messages, sends in flight
    LendAct, HoldAct, ReturnAct, ReclaimAct         RankState        both of these
    AllReduceBucket, ClipGrad, OptStep, …           StepEndState     gradients, optimizers, the tally
    GatherParams, FreeParams, AllGatherBucket       ZeroState        sharded weights, gradients

Values pass from one instruction to another through `ValueCells`; `CurrentStep` is the batch that all of them run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
from ..optim.gathered_matrix_steps import Stepper
from ..optim.loss_scale import LossScale
from ..parallel.mesh_groups import MeshGroups
from ..parallel.mesh_independent_dropout import MaskUnit
from ..settings.engine_settings import RunSettings
from ..stage.batches.microbatches import NOTHING, Batch
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
from .handlers.calls_bound_to_shapes import bound
from .offload_instructions import HostCopies
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
    """Function that returns who examines the blocks of a rank; by default nobody does."""
    shows_modules: bool = False
    """Whether the user's loop has the modules, and may read their weights whenever a step has returned."""
    finds_loss: bool = True
    """Whether the loss and metrics are called, as they are where somebody trains."""

    @property
    def functions(self) -> dict[str, Any]:
        """User functions other than blocks (the loss, metrics), by name."""
        return {"the loss function": self.loss_fn, **{f"metric {name!r}": m for name, m in self.metrics.items()}}


NO_CONTEXT = nullcontext()
"""A null context, which may be entered any number of times."""

ONLY = (0,)
"""The output numbers of a backward with a single output."""


BackwardRoots = tuple[tuple[Root, ...], tuple[int, ...], tuple[Tensor, ...]]
"""Roots of a backward: autograd edges of outputs, whose gradients are received, then those of losses.

Then the output numbers of the first ones, and the gradients of the others, times the loss scale.
"""

NO_ROOTS: BackwardRoots = (), (), ()


def root_gradients(numbers: Sequence[int], ones: Outputs, of_outputs: Outputs) -> Outputs:
    """Return the gradients of all roots, given those of the outputs."""
    return (*[of_outputs[number] for number in numbers], *ones) if numbers else ones


def with_loss_root(start: BackwardRoots, loss: Tensor, scale: LossScale) -> BackwardRoots:
    """Return roots with `loss` as one as well, if it requires a gradient."""
    if not loss.requires_grad:
        return start
    roots, numbers, ones = start
    return (*roots, edge_of(loss)), numbers, (*ones, scale.gradient_of(loss, 1.0))


SavedForward = tuple[Outputs, BackwardRoots, list[Rerun], MaskUnit | None]
"""State that a forward keeps for its backward: inputs, roots, reruns; and its unit where blocks draw random numbers."""


@dataclass
class CurrentStep:
    """The batch that is run and its units.

    `number` counts the training steps made over all runs, `runs` those of this program alone. Under gradient
    accumulation, the batch is one part of the step's: `last` marks its last part, and `samples_before` is the number of
    samples of earlier parts. `outputs` collects the last block's output for each unit, where the caller asked for it.
    """

    batch: Batch = NOTHING
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
        """Return `call` so that it is skipped for a unit without samples, or `otherwise` called instead.

        A unit that is computed all the same, for what replicas exchange, is so by `without_samples`.
        """

        def run() -> None:
            if unit not in self.units.empty:
                (call if without_samples is None or self.units.samples[unit] else without_samples)()
            elif otherwise is not None:
                otherwise()

        run.bind = lambda units: (  # type: ignore[attr-defined]
            otherwise
            if unit in units.empty
            else bound(call, units)
            if without_samples is None or units.samples[unit]
            else without_samples
        )
        return run


@dataclass(frozen=True)
class ComputeState:
    """State of forwards and backwards.

    `shape` is that of the units that the program was bound for; `token_shards` is, per stage, the number of ranks of tp
    over which its input tokens are sharded; `queues` collect deferred weight gradients per stage with split backwards;
    a microbatch of `usual_samples` weighs 1 where its loss comes without a weight. `saved`, `pending` and `stores` live
    from one computation to another.
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
    moved: HostCopies
    boundaries: BoundaryGradients
    overlaps: Overlaps
    saved: dict[Value, SavedForward] = field(default_factory=dict)
    pending: dict[Value, Products] = field(default_factory=dict)
    stores: dict[tuple[int, int], Store] = field(default_factory=dict)


class BoundReceive(NamedTuple):
    """Post of one receive, given by its index in the program, into its buffers; valid until a buffer grows."""

    place: int
    cell: ValueCell
    shape: UnitShape
    generation: int
    tensors: Outputs
    post: Callable[[], Work]


@dataclass(frozen=True)
class MessageState:
    """State of sends and receives; `max_sends` is the limit of sends in flight per channel, None: any number.

    `shape` is that of the units that it was bound for. All plans of a rank share `buffers`: they run one after the
    other.
    """

    flows: ProgramFlow
    current: CurrentStep
    cells: ValueCells
    shape: UnitShape
    transport: Transport
    max_sends: int | None
    buffers: ReceiveBuffers


@dataclass
class GradOutcome:
    """Outcome of a step's gradient: a function that returns its global norm, and whether it was not finite.

    `empty`: the step is skipped for lack of samples; `stop_asked`: a rank was asked to stop after it.
    """

    norm: Callable[[], Tensor] | None = None
    skipped: bool = False
    empty: bool = False
    stop_asked: bool = False


@dataclass(frozen=True)
class StepEndState:
    """State of the instructions that end a step; `clip` is the maximum global norm, None: no clipping.

    `marks` are those of the ranks' data; `earlier`, the figures of accumulated batches; `settle_loss` has ranks agree
    on the unit of the loss's mean, before weights first change.
    """

    waits: Waits
    tally: Tally
    metrics_group: Group
    gradients: GradientHandling
    masters: Masters
    steppers: Mapping[tuple[int, ...], Stepper]
    clip: float | None
    scale: LossScale
    marks: DataMarks
    settle_loss: Callable[..., None]
    earlier: list[StepFigures]
    outcome: GradOutcome = field(default_factory=GradOutcome)


@dataclass(frozen=True)
class ZeroState:
    """State of the ZeRO instructions; without ZeRO `weights` are empty."""

    waits: Waits
    weights: ShardedWeights
    gradients: GradientHandling


@dataclass(frozen=True)
class RankState:
    """One rank's state while it runs a program; each handler is bound to its own view of it."""

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
            self.compute.gradients.reducer.begin_step(self.compute.tally.passengers)

    def end_step(self) -> None:
        """End the step: drop its batch."""
        self.current.batch = NOTHING
