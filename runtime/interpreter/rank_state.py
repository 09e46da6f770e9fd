"""What the instructions of one rank work on, split by who may touch it.

    Fwd, Bwd, BwdInput, BwdWeight, Recompute        ComputeState     stages, what forwards keep, the tally, gradients
    OffloadAct, FetchAct                              its `host`     copies of what forwards keep
    SendAct, RecvAct, SendGrad, RecvGrad            MessageState     transport, shapes of what travels, sends in flight
    AllReduceBucket, ClipGrad, OptStep, …           StepEndState     gradients, optimizers, the tally
    GatherParams, FreeParams, AllGatherBucket       ZeroState        sharded weights, gradients

Values go from one instruction to another through `Cells`; `CurrentStep` is the batch that all of them run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.ir.values import Value

from ..autograd.deferred_weight_grads import Products, WeightQueue
from ..autograd.kv_store import Store
from ..autograd.recompute import Rerun
from ..autograd.run_backward import Root, edge_of
from ..blocks.trees import TreeSpec
from ..comm import Group, Transport
from ..comm.interleaving import Overlaps
from ..optim.gathered import Stepper
from ..parallel.context.context import Context
from ..parallel.dropout import Unit
from ..stage.cargo import Cargo
from ..stage.forward import Outputs, StageForward
from ..stage.microbatches import NOTHING, Batch
from ..state.master_weights import Masters
from ..state.training_state import Gradients
from ..state.zero_params import ShardedWeights
from .cells import Cells, ReceiveBuffers, Waits
from .clock import Clock
from .data_flow import ProgramFlow
from .host_copies import HostCopies
from .tally import Tally

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]
MetricFn = Callable[[Any, Any], Tensor]


class Start(NamedTuple):
    """Where a backward starts: the edges of outputs, whose gradients come from elsewhere, then those of losses.

    `numbers` says which output each of the first is; `ones` are the gradients of the others.
    """

    roots: tuple[Root, ...] = ()
    numbers: tuple[int, ...] = ()
    ones: tuple[Tensor, ...] = ()

    def with_loss(self, loss: Tensor) -> Start:
        """Return a start at `loss` as well, if it has a gradient."""
        if not loss.requires_grad:
            return self
        return Start((*self.roots, edge_of(loss)), self.numbers, (*self.ones, torch.ones_like(loss)))


class Saved(NamedTuple):
    """What a forward keeps for its backward; `unit` is there where blocks draw."""

    given: Outputs
    start: Start
    reruns: list[Rerun]
    unit: Unit | None = None


@dataclass
class CurrentStep:
    """The batch that is run; `number` says how many steps the training has made, over all its runs.

    `outputs` collects what the last block gives for each unit, where somebody wants to know.
    """

    batch: Batch = NOTHING
    number: int = 0
    outputs: dict[int, Any] | None = None


@dataclass(frozen=True)
class UnitPlace:
    """Where units are in the batch, and what of a sequence a stage is given.

    Attributes:
        inputs: one unit of inputs, as the ranks agreed on it.
        replica: which of the replicas that divide the batch this rank belongs to.
        context: what blocks are given where sequences are cut over cp; None where they are not.
        token_shards: per stage, over how many ranks of tp the tokens that it is given are sharded.
        device: where the rank computes.
    """

    inputs: TreeSpec
    replica: int
    context: Context | None
    token_shards: Mapping[int, int]
    device: torch.device

    def unit_of(self, schedule: ScheduleSpec, number: int, step: int) -> Unit:
        """Return which samples of a step's batch a unit has, and the positions of its tokens."""
        shape = self.inputs.samples.shape
        microbatch, part = divmod(number, schedule.slices)
        first = (self.replica * schedule.microbatches + microbatch) * shape[0]
        positions = None
        if self.context is not None:
            positions = self.context.positions
        elif schedule.slices > 1:
            positions = torch.arange(part * shape[1], (part + 1) * shape[1], device=self.device)
        return Unit(step, range(first, first + shape[0]), positions)

    def require_input(self, batch: Batch) -> None:
        """Raise `MisfitError` unless units of inputs have the shape that the ranks agreed on."""
        found = batch.input_spec()
        if found.tensors != self.inputs.tensors or not found.tree.is_built_as(self.inputs.tree):
            raise MisfitError(
                f"a microbatch of inputs is {found}; the first step's was {self.inputs}, and "
                "buffers are made once: pad the batch, and give padded samples no loss weight"
            )


@dataclass(frozen=True)
class ComputeState:
    """What forwards and backwards touch.

    `cargo` says what travels between stages, for one unit; `queues` collect the weight gradients that wait,
    per stage whose backwards are split. `saved`, `pending` and `stores` are what lasts from one computation to another.
    """

    flows: ProgramFlow
    current: CurrentStep
    cells: Cells
    clock: Clock
    tally: Tally
    forwards: Mapping[int, StageForward]
    cargo: Cargo
    place: UnitPlace
    loss_fn: LossFn
    metrics: Mapping[str, MetricFn]
    gradients: Gradients
    queues: Mapping[int, WeightQueue]
    host: HostCopies
    overlaps: Overlaps
    saved: dict[Value, Saved] = field(default_factory=dict)
    pending: dict[Value, Products] = field(default_factory=dict)
    stores: dict[tuple[int, int], Store] = field(default_factory=dict)


@dataclass(frozen=True)
class MessageState:
    """What sends and receives touch; `max_sends` is how many of a channel may be in flight, None: any number.

    All plans that the rank runs have the same `buffers`: they run one after the other.
    """

    flows: ProgramFlow
    cells: Cells
    cargo: Cargo
    transport: Transport
    max_sends: int | None
    buffers: ReceiveBuffers


@dataclass
class GradOutcome:
    """What became of a step's gradient: its global norm, and whether the step is skipped since it is not finite."""

    norm: Tensor | None = None
    skipped: bool = False


@dataclass(frozen=True)
class StepEndState:
    """What ends a step touches; `clip` is the threshold of the global norm, None: gradients are not scaled."""

    waits: Waits
    tally: Tally
    metrics_group: Group
    gradients: Gradients
    masters: Masters
    steppers: Mapping[tuple[int, ...], Stepper]
    clip: float | None
    outcome: GradOutcome = field(default_factory=GradOutcome)


@dataclass(frozen=True)
class ZeroState:
    """What the instructions of ZeRO touch; without ZeRO `weights` are empty."""

    waits: Waits
    weights: ShardedWeights
    gradients: Gradients


@dataclass(frozen=True)
class RankState:
    """One rank's state while it runs a program: each handler is bound to its view of it."""

    flows: ProgramFlow
    current: CurrentStep
    cells: Cells
    waits: Waits
    compute: ComputeState
    messages: MessageState
    step_end: StepEndState
    zero: ZeroState

    def begin(self, batch: Batch) -> None:
        """Start a step on `batch`."""
        self.cells.settle()
        self.current.batch = batch
        self.compute.tally.begin()
        self.compute.host.begin()
        self.step_end.outcome.norm, self.step_end.outcome.skipped = None, False
        if self.flows.trains:
            self.compute.gradients.reducer.begin(self.compute.tally.passengers)

    def end(self) -> None:
        """End the step: nothing of its batch is kept."""
        self.current.batch = NOTHING
