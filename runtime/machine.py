"""What the instructions of one rank work on: stages, values between instructions, the batch, the sums of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintsched.dataflow import Flow, Kind, Value, flow
from quintsched.errors import MisfitError
from quintsched.instructions import ENDS_BACKWARD, Compute, Instruction
from quintsched.plan import Plan

from .blocks import TensorSpec
from .gradients import Gradients
from .groups import MeshGroups
from .stages import Stage
from .transport import Transport, Work

LossFn = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor | float]]
MetricFn = Callable[[Tensor, Tensor], Tensor]

SENDS_KEPT = 4
"""How many sends of a channel may be under way; the next one first waits for the oldest of them.

That wait is free of deadlock only for plans that are so under the `blocking` profile; for others nothing is awaited.
"""


@dataclass(frozen=True)
class Batch:
    """This rank's share of a batch, cut into microbatches; what the rank does not need is empty."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    extras: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Saved:
    """What a forward keeps for its backward: the input, and the outputs that the backward starts from.

    `gradient` is that of the output, kept by the input half of a backward for the weight half.
    """

    given: Tensor
    output: Tensor
    auxiliary: Tensor | None
    gradient: Tensor | None = None

    def roots(self, gradient: Tensor | None) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return where a backward starts, and with which gradients: the output, and the auxiliary loss."""
        roots = [(self.output, gradient), (self.auxiliary, None)]
        used = [(root, grad) for root, grad in roots if root is not None and root.requires_grad]
        return [root for root, _ in used], [grad for _, grad in used]


class Clock:
    """Adds up the time a rank computes. On a GPU, where the host runs ahead, it measures by events."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] | None = (
            deque() if device.type == "cuda" else None
        )
        self._seconds = 0.0
        self._since = 0.0
        self._began: torch.cuda.Event | None = None

    def start(self) -> None:
        """Begin a stretch of computation."""
        if self._events is None:
            self._since = time.perf_counter()
        else:
            self._began = _event_now()

    def stop(self) -> None:
        """End the stretch that `start` began."""
        if self._events is None:
            self._seconds += time.perf_counter() - self._since
        elif self._began is not None:
            self._events.append((self._began, _event_now()))
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

    def _add_oldest(self, events: deque[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        begin, end = events.popleft()
        self._seconds += begin.elapsed_time(end) / 1000


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Machine:
    """One rank's state while it runs programs. Handlers in `interpreter` are bound to it.

    `specs` says what each stage gives for a microbatch. `tally` holds the sums of the step, float64: loss, loss
    weight, then one per metric.
    """

    plan: Plan
    pp_rank: int
    stages: Mapping[int, Stage]
    input_spec: TensorSpec
    specs: Mapping[int, TensorSpec]
    transport: Transport
    groups: MeshGroups
    clock: Clock
    loss_fn: LossFn
    metrics: Mapping[str, MetricFn]
    tally: Tensor
    gradients: Gradients | None = None
    optimizers: Mapping[tuple[int, ...], Optimizer] = field(default_factory=dict)
    clip: float | None = None
    sends_kept: int | None = SENDS_KEPT
    batch: Batch = field(default_factory=lambda: Batch((), (), ()))
    values: dict[Value, Tensor] = field(default_factory=dict)
    arrivals: dict[Value, Work] = field(default_factory=dict)
    saved: dict[Value, Saved] = field(default_factory=dict)
    sent: dict[int, deque[tuple[Work, Tensor]]] = field(default_factory=dict)
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

    def is_last_backward(self, instruction: Compute) -> bool:
        """Whether it completes the weight gradients of its stage."""
        ends = (i for i in reversed(self.plan.programs[self.pp_rank]) if isinstance(i, ENDS_BACKWARD))
        return next((i for i in ends if i.stage == instruction.stage), None) == instruction

    def take(self, value: Value) -> Tensor:
        """Return a value and forget it; one that comes from another rank is waited for first."""
        work = self.arrivals.pop(value, None)
        if work is not None:
            work.wait()
        return self.values.pop(value)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send without blocking; of older sends of the channel only the last few may still be under way."""
        channel = self.sent.setdefault(peer, deque())
        if self.sends_kept is not None and len(channel) >= self.sends_kept:
            channel.popleft()[0].wait()
        channel.append((self.transport.send(tensor, peer, tag), tensor))

    def require_input(self, microbatch: Tensor) -> None:
        """Raise `MisfitError` unless a microbatch of inputs has the shape that the ranks agreed on."""
        if TensorSpec.of(microbatch) != self.input_spec:
            raise MisfitError(
                f"a microbatch of inputs is {TensorSpec.of(microbatch)}; the first step's was {self.input_spec}, and "
                "buffers are made once: pad the batch, and give padded samples no loss weight"
            )

    def begin(self, batch: Batch) -> None:
        """Start a step on `batch`. What was sent in the step before has been received by now: let go of it."""
        for channel in self.sent.values():
            while channel:
                channel.popleft()[0].wait()
        self.batch = batch
        self.tally = torch.zeros_like(self.tally)
        self.shared = self.norm = None
        self.skipped = False
        if self.trains and self.gradients is not None:
            self.gradients.attach()

    def weight(self) -> Tensor:
        """Return the batch's total loss weight, waiting until it is known."""
        if self.shared is not None:
            self.shared.wait()
        return self.tally[1]


def tag_of(value: Value) -> int:
    """Return the tag of the message that carries a value: one per stage and direction."""
    return 2 * value.stage + (value.kind is Kind.OUTPUT_GRAD)
