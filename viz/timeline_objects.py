"""Scene of a picture, as data: the spans of a simulation or a measured step, converted to objects to draw.

    rank 0   [F0][F1] . . [ B0 ]        Box: a computation
               ╲          ╱             Arrow: a message, from the sender's row to the receiver's consumer
    rank 1   .  [F0][ B0 ] ~~[▮]◆       Wait: for another rank, if it was measured
             [F1/B0]                     an overlapped pair is two boxes, one above the other
               └F0┘                     Strip: a copy to host memory or back, or a collective among replicas
                                        Mark: any other instruction, at its time; Bar: its duration, if not 0

No matplotlib here, and no coordinates but rank and time.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.ir.dataflow_analysis import Value, ValueKind
from quintsched.ir.instruction_set import (
    AMONG_REPLICAS,
    Compute,
    HoldAct,
    HostCopy,
    Instruction,
    Overlap,
    ReclaimAct,
    Recv,
    Send,
)
from quintsched.simulation.held_activations import flows_of_ranks
from quintsched.simulation.simulator import Simulation
from quintsched.trace.measured_trace import MeasuredStep


@dataclass(frozen=True, slots=True)
class ComputationBox:
    """Computation; `chunk` counts the stages of its rank from 0.

    It fills the row's height, or, in an overlap, the `lane`-th from above of `lanes` equal parts.
    """

    rank: int
    start: float
    end: float
    instruction: Compute
    chunk: int
    lane: int = 0
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Arrow:
    """Message; `kind` is that of the value it carries."""

    source: int
    target: int
    start: float
    end: float
    kind: ValueKind


@dataclass(frozen=True, slots=True)
class InstructionMark:
    """Instructions of one class at one time on one rank."""

    rank: int
    time: float
    what: type[Instruction]


@dataclass(frozen=True, slots=True)
class Bar:
    """Duration of a marked instruction."""

    rank: int
    start: float
    end: float
    what: type[Instruction]


@dataclass(frozen=True, slots=True)
class Strip:
    """Copy between device and host memory, or collective among replicas, beside computation."""

    rank: int
    start: float
    end: float
    what: type[Instruction]


@dataclass(frozen=True, slots=True)
class WaitingTime:
    """Time that an instruction waits for another rank before it runs."""

    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class Scene:
    """All objects of one pipeline.

    `names` label the rows at the left, and `notes` at the right; () for rank numbers, and for the fraction of time that
    each rank computes.
    """

    ranks: int
    makespan: float
    busy: tuple[float, ...]
    boxes: tuple[ComputationBox, ...]
    arrows: tuple[Arrow, ...]
    marks: tuple[InstructionMark, ...]
    bars: tuple[Bar, ...] = ()
    waits: tuple[WaitingTime, ...] = ()
    strips: tuple[Strip, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """Maximum number of stages per rank."""
        return max((box.chunk for box in self.boxes), default=0) + 1


def stage_scene(run: Simulation | MeasuredStep) -> Scene:
    """Return the scene of a simulation or a measured step."""
    layout, flows = run.plan.layout, flows_of_ranks(run)
    chunk_of = {stage: c for rank in range(len(run.timeline)) for c, stage in enumerate(layout.stages_of(rank))}
    arrivals = arrivals_of(run)
    boxes, arrows, bars, waits, strips = [], [], [], [], []
    marks: dict[InstructionMark, None] = {}
    for rank, row in enumerate(run.timeline):
        for span, used in zip(row, flows[rank], strict=True):
            began = span.runs
            match span.instruction:
                case Compute() | Overlap() as i:
                    for lane, side in enumerate(i.sides):
                        assert isinstance(side, Compute)
                        boxes.append(
                            ComputationBox(rank, began, span.end, side, chunk_of[side.stage], lane, len(i.sides))
                        )
                case Send() as i:
                    value = used.consumes[0]
                    arrows.append(Arrow(rank, i.peer, span.start, arrivals.get(value, span.end), value.kind))
                case Recv():
                    continue
                case i if isinstance(i, (HostCopy, *AMONG_REPLICAS)) and span.end > began:
                    strips.append(Strip(rank, began, span.end, type(i)))
                case i:
                    marks[InstructionMark(rank, began, type(i))] = None
                    bars += [Bar(rank, began, span.end, type(i))] if span.end > began else []
            waits += [WaitingTime(rank, span.start, began)] if began > span.start else []
    return Scene(
        ranks=len(run.timeline),
        makespan=run.makespan,
        busy=run.busy,
        boxes=tuple(boxes),
        arrows=tuple(arrows),
        marks=tuple(marks),
        bars=tuple(bars),
        waits=tuple(waits),
        strips=tuple(strips),
    )


def arrivals_of(run: Simulation | MeasuredStep) -> dict[Value, float]:
    """Return the time at which each message arrived, or, if measured, at which its consumer had it."""
    return {
        _sent_as(span.instruction, used.produces[0]): span.end
        for row, flows in zip(run.timeline, flows_of_ranks(run), strict=True)
        for span, used in zip(row, flows, strict=True)
        if isinstance(span.instruction, Recv)
    }


def _sent_as(receive: Recv, value: Value) -> Value:
    """Return the value that the sender of a message consumes: lent activations have other names on both ends."""
    if isinstance(receive, HoldAct):
        return value._replace(kind=ValueKind.SAVED)
    return value._replace(kind=ValueKind.LENT) if isinstance(receive, ReclaimAct) else value
