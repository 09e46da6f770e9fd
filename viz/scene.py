"""What a picture shows, as plain data: a simulation sorted into boxes, arrows, marks and what is held.

    rank 0   [F0][F1] . . [ B0 ]        Box: a computation
               ╲          ╱             Arrow: a message, from the sender's row to the receiver's
    rank 1   .  [F0][ B0 ] . .  ◆       Mark: anything else, at its time

No matplotlib here, and no coordinate but rank and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintsched.dataflow import Kind, flow, message_value
from quintsched.instructions import Compute, Instruction, Message, Send
from quintsched.memory import HELD
from quintsched.simulator import Simulation

ROUNDING = 1e-9
"""Times closer than this share of the makespan are the same, but for the rounding of sums."""


@dataclass(frozen=True, slots=True)
class Box:
    """A computation; `chunk` counts the stages of its rank from 0."""

    rank: int
    start: float
    end: float
    instruction: Compute
    chunk: int


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message; `kind` is that of the value it carries."""

    source: int
    target: int
    start: float
    end: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Mark:
    """Instructions of one class at one time on one rank."""

    rank: int
    time: float
    what: type[Instruction]


@dataclass(frozen=True)
class Scene:
    """All that is drawn of one pipeline."""

    ranks: int
    makespan: float
    busy: tuple[float, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    marks: tuple[Mark, ...]

    @property
    def chunks(self) -> int:
        """The most stages that a rank computes."""
        return max((box.chunk for box in self.boxes), default=0) + 1


def stage_scene(simulation: Simulation) -> Scene:
    """Sort a simulation's spans into what is drawn."""
    layout = simulation.plan.layout
    chunk_of = {stage: c for rank in range(len(simulation.timeline)) for c, stage in enumerate(layout.stages_of(rank))}
    boxes, arrows = [], []
    marks: dict[Mark, None] = {}
    for rank, row in enumerate(simulation.timeline):
        for span in row:
            match span.instruction:
                case Compute() as i:
                    boxes.append(Box(rank, span.start, span.end, i, chunk_of[i.stage]))
                case Send() as i:
                    arrows.append(Arrow(rank, i.peer, span.start, span.end, message_value(i, layout).kind))
                case Message():
                    pass
                case i:
                    marks[Mark(rank, span.start, type(i))] = None
    return Scene(
        ranks=len(simulation.timeline),
        makespan=simulation.makespan,
        busy=simulation.busy,
        boxes=tuple(boxes),
        arrows=tuple(arrows),
        marks=tuple(marks),
    )


@dataclass(frozen=True)
class Held:
    """What one rank keeps for its backwards: `amounts[i]` microbatches of a whole rank from `times[i]` on."""

    times: tuple[float, ...]
    amounts: tuple[float, ...]
    peak: float


def held_activations(simulation: Simulation) -> tuple[Held, ...]:
    """Return what each rank holds over time: from a forward's start to its backward's end; () if nothing is kept."""
    plan = simulation.plan
    changes: list[list[tuple[float, int]]] = []
    for rank, row in enumerate(simulation.timeline):
        of_rank: list[tuple[float, int]] = []
        for span in row:
            used = flow(span.instruction, plan.layout, rank)
            of_rank += [(span.end, -1) for value in used.consumes if value.kind in HELD]
            of_rank += [(span.start, 1) for value in used.produces if value.kind is Kind.SAVED]
            of_rank += [(span.end, 1) for value in used.produces if value.kind is Kind.PENDING]
        changes.append(sorted(of_rank, key=lambda change: change[0]))
    if not any(changes):
        return ()
    return tuple(_add_up(of_rank, plan.schedule.parts, simulation.makespan * ROUNDING) for of_rank in changes)


def _add_up(changes: Sequence[tuple[float, int]], parts: int, instant: float) -> Held:
    """Add up changes in the order of time; those less than `instant` apart are one step."""
    at, now, peak = 0.0, 0, 0
    after = {at: now}
    for time, change in changes:
        at = time if time - at > instant else at
        now += change
        peak = max(peak, now)
        after[at] = now
    return Held(tuple(after), tuple(amount / parts for amount in after.values()), peak / parts)
