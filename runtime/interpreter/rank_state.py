"""What the instructions of one rank work on: stages, values between instructions, the batch, the sums of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintsched.errors import MisfitError
from quintsched.ir.dataflow import Flow, Kind, Value, flow
from quintsched.ir.instructions import ENDS_BACKWARD, Instruction
from quintsched.plan import Plan

from ..autograd.deferred_weight_grads import Products, WeightQueue
from ..autograd.kv_store import Store
from ..autograd.recompute import Rerun
from ..autograd.run_backward import Root, edge_of
from ..blocks.blocks import Parcel, TensorSpec
from ..comm import Transport, Work
from ..comm.clock import now_s
from ..comm.device import is_accelerator, timing_event
from ..parallel.context.context import Context
from ..parallel.mesh_groups import MeshGroups
from ..stage.forward import Outputs, StageForward
from ..stage.microbatches import NOTHING, Batch
from ..state.grad_reducer import Gradients
from ..state.master_weights import Masters
from ..state.zero_params import SharedWeights
from .recorder import Recorder

LossFn = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor | float]]
MetricFn = Callable[[Tensor, Tensor], Tensor]

SENDS_KEPT = 4
"""How many sends of a channel may be under way; the next one first waits for the oldest of them.

That wait is free of deadlock only for plans that are so under the `blocking` profile; for others nothing is awaited.
"""


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
    """What a forward keeps for its backward."""

    given: Outputs
    start: Start
    reruns: list[Rerun]


class Cell:
    """Where one value stands between two instructions, and, if it goes to another rank, until its send is done.

    One that comes from another rank is waited for when it is taken.
    """

    __slots__ = ("held", "receive", "sent", "works")

    def __init__(self) -> None:
        self.held: Outputs = ()
        self.works: Sequence[Work] = ()
        self.sent: tuple[Sequence[Work], Outputs] | None = None
        self.receive: int | None = None


class Tally:
    """Loss, loss weight and metrics of a step: collected per microbatch, added up once."""

    def __init__(self, num_metrics: int, device: torch.device) -> None:
        self._device = device
        self._columns: list[list[Tensor | float]] = [[] for _ in range(2 + num_metrics)]
        self.losses, self.weights, *self.metrics = self._columns

    def sums(self) -> Tensor:
        """Return the sums, float64: loss, loss weight, then one per metric; begin again."""
        if not any(self._columns):
            return torch.zeros(len(self._columns), dtype=torch.float64, device=self._device)
        sums = [_total(column) for column in self._columns]
        for column in self._columns:
            column.clear()
        return torch.stack([self._as_tensor(total) for total in sums])

    def _as_tensor(self, total: Tensor | float) -> Tensor:
        """Return a sum where the others are; a number is written there, not copied, which would wait for a GPU."""
        if isinstance(total, Tensor):
            return total.to(self._device, torch.float64)
        return torch.full((), float(total), dtype=torch.float64, device=self._device)


def _total(column: Iterable[Tensor | float]) -> Tensor | float:
    """Add up numbers on the host and tensors where they are, in double precision."""
    tensors = [x for x in column if isinstance(x, Tensor)]
    numbers = sum(x for x in column if not isinstance(x, Tensor))
    if not tensors:
        return numbers
    if len({t.dtype for t in tensors}) > 1:
        tensors = [t.to(torch.float64) for t in tensors]
    return torch.stack(tensors).sum(dtype=torch.float64) + numbers


class Clock:
    """Adds up the time a rank computes. On a GPU, where the host runs ahead, it measures by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[tuple[torch.Event, torch.Event]] | None = deque() if is_accelerator(device) else None
        self._seconds = 0.0
        self._since = 0.0
        self._began: torch.Event | None = None

    def start(self) -> None:
        """Begin a stretch of computation."""
        if self._events is None:
            self._since = now_s()
        else:
            self._began = timing_event(self._device)

    def stop(self) -> None:
        """End the stretch that `start` began."""
        if self._events is None:
            self._seconds += now_s() - self._since
        elif self._began is not None:
            self._events.append((self._began, timing_event(self._device)))
            while self._events and self._events[0][1].query():
                self._add_oldest(self._events)

    def read_s(self) -> float:
        """Return the seconds since the last reading; on a GPU this waits for the work to end."""
        if self._events:
            self._events[-1][1].synchronize()
            while self._events:
                self._add_oldest(self._events)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_oldest(self, events: deque[tuple[torch.Event, torch.Event]]) -> None:
        begin, end = events.popleft()
        self._seconds += begin.elapsed_time(end) / 1000


@dataclass
class Machine:
    """One rank's state while it runs programs. Handlers are bound to it.

    `parcels` says what each stage leaves for the next, for one unit. `tally` collects the step's loss and metrics,
    `sums` holds them once they are shared. `weights` are those that replicas share out. `context` is what blocks are
    told where sequences are shared out over cp; `token_parts` says into how many parts the tokens that a stage is given
    are cut over tp. `replica` is which share of a batch this rank takes, `step` how many steps the training has made,
    over all its runs.
    """

    plan: Plan
    pp_rank: int
    forwards: Mapping[int, StageForward]
    input_spec: TensorSpec
    parcels: Mapping[int, Parcel]
    transport: Transport
    groups: MeshGroups
    clock: Clock
    loss_fn: LossFn
    metrics: Mapping[str, MetricFn]
    tally: Tally
    gradients: Gradients | None = None
    queues: Mapping[int, WeightQueue] = field(default_factory=dict)
    optimizers: Mapping[tuple[int, ...], Optimizer] = field(default_factory=dict)
    masters: Masters | None = None
    weights: SharedWeights | None = None
    clip: float | None = None
    sends_kept: int | None = SENDS_KEPT
    context: Context | None = None
    token_parts: Mapping[int, int] = field(default_factory=dict)
    replica: int = 0
    step: int = 0
    batch: Batch = NOTHING
    cells: dict[Value, Cell] = field(default_factory=dict)
    saved: dict[Value, Saved] = field(default_factory=dict)
    pending: dict[Value, Products] = field(default_factory=dict)
    stores: dict[tuple[int, int], Store] = field(default_factory=dict)
    sending: list[Cell] = field(default_factory=list)
    recorder: Recorder | None = None
    sums: Tensor | None = None
    shared: Work | None = None
    norm: Tensor | None = None
    skipped: bool = False

    @property
    def trains(self) -> bool:
        """Whether the plan trains; else it only runs forward."""
        return self.plan.mode == "train"

    def flow(self, instruction: Instruction) -> Flow:
        """Return what an instruction takes and makes on this rank."""
        return flow(instruction, self.plan.layout, self.pp_rank)

    @cached_property
    def last_backwards(self) -> frozenset[Instruction]:
        """What completes the weight gradients of each stage."""
        last = {i.stage: i for i in self.plan.programs[self.pp_rank] if isinstance(i, ENDS_BACKWARD)}
        return frozenset(last.values())

    def cell(self, value: Value) -> Cell:
        """Return the place of a value."""
        return self.cells.setdefault(value, Cell())

    def taker(self, value: Value, index: int) -> Callable[[], Outputs]:
        """Return what takes a value away for instruction `index`, waiting for it if it comes from another rank.

        A gradient that comes back says that the activation it belongs to has arrived: what was sent is let go.
        """
        cell = self.cell(value)
        goes_back = value.kind is Kind.OUTPUT_GRAD
        answered = self.cell(Value(Kind.OUTPUT, value.stage, value.number)) if goes_back else None

        def take() -> Outputs:
            works = cell.works
            if works:
                cell.works = ()
                if self.recorder is None:
                    for work in works:
                        work.wait()
                else:
                    self.wait(works, index, cell.receive)
                if answered is not None and answered.sent is not None:
                    self.let_go(answered, index)
            held, cell.held = cell.held, ()
            return held

        return take

    def wait(self, works: Iterable[Work], index: int, receive: int | None = None) -> None:
        """Wait for what comes from other ranks; the time counts as instruction `index`'s, and as its receive's."""
        recorder = self.recorder
        if recorder is None:
            for work in works:
                work.wait()
            return
        since = recorder.now()
        for work in works:
            work.wait()
        until = recorder.now()
        recorder.add_wait(index, since, until)
        if receive is not None:
            recorder.add_wait(receive, since, until)
            recorder.mark(receive, end=until)

    def let_go(self, cell: Cell, index: int) -> None:
        """Let go of what was sent from a cell, once that is done."""
        if cell.sent is not None:
            works, cell.sent = cell.sent[0], None
            self.wait(works, index)

    def require_input(self, unit: Tensor) -> None:
        """Raise `MisfitError` unless a unit of inputs has the shape that the ranks agreed on."""
        if TensorSpec.of(unit) != self.input_spec:
            raise MisfitError(
                f"a microbatch of inputs is {TensorSpec.of(unit)}; the first step's was {self.input_spec}, and "
                "buffers are made once: pad the batch, and give padded samples no loss weight"
            )

    def settle(self) -> None:
        """Let go of what was sent in the step before: the next one, of any plan, begins when it has been received."""
        for cell in self.sending:
            if cell.sent is not None:
                works, cell.sent = cell.sent[0], None
                for work in works:
                    work.wait()

    def begin(self, batch: Batch) -> None:
        """Start a step on `batch`."""
        self.settle()
        self.batch = batch
        self.sums = self.shared = self.norm = None
        self.skipped = False
        if self.trains and self.gradients is not None:
            self.gradients.attach()

    def weight(self, index: int) -> Tensor:
        """Return the batch's total loss weight, waiting until it is known."""
        assert self.sums is not None
        if self.shared is not None:
            self.wait([self.shared], index)
        return self.sums[1]
