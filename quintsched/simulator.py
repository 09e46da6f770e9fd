"""Time a plan: the event graph of the `channel` profile, run under a cost model.

Communication overlaps with computation as the runtime does it: a message starts when its value is made and its
channel is free, and only who takes the value waits for it.

    makespan      when the last instruction ends
    bubble        1 - busy / (ranks x makespan)
    span_bubble   (longest span of a rank - its work) / longest span; a span runs from a rank's first forward to
                  its last weight gradient (the measure of the zero-bubble papers, arXiv:2401.10241)
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.costs import Costs
from quintsched.dataflow import flows_of
from quintsched.errors import UnsoundError
from quintsched.events import PROFILES, Events, Place, Run, build_graph, merge_events
from quintsched.instructions import Bwd, Compute, Fwd, Instruction, Message
from quintsched.memory import peak_activations
from quintsched.plan import Plan
from quintsched.wellformed import malformations


@dataclass(frozen=True)
class Span:
    """When one instruction runs, in the costs' unit of time."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a run would look like. `timeline[k]` holds the spans of pp rank k in program order."""

    plan: Plan
    unit: str
    timeline: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    peak_activations: tuple[float, ...]
    critical_path: tuple[Place, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time until the makespan in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def span(self) -> float:
        """The longest span of a rank: from its first forward to its last weight gradient."""
        return max(self.spans)

    @property
    def span_bubble(self) -> float:
        """(longest span - that rank's work) / longest span."""
        longest = max(range(len(self.spans)), key=self.spans.__getitem__)
        return 1 - self.busy[longest] / self.span if self.span else 0.0

    def summary(self) -> dict[str, object]:
        """Return the figures as plain data, for JSON."""
        path = [
            {"rank": p.rank, "index": p.index, "instruction": str(self.plan.programs[p.rank][p.index])}
            for p in self.critical_path
        ]
        return {
            "schedule": self.plan.schedule.name,
            "mesh": dict(self.plan.mesh.axes),
            "microbatches": self.plan.schedule.microbatches,
            "chunks": self.plan.schedule.chunks,
            "unit": self.unit,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "span": self.span,
            "span_bubble": self.span_bubble,
            "peak_activations": list(self.peak_activations),
            "critical_path": path,
        }


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Run a plan under `costs` (default: unit costs).

    Raises `UnsoundError` for a plan that is malformed or cannot finish, `InputError` for costs that do not fit it.
    """
    costs = costs or Costs()
    costs.check_stages(len(plan.stage_to_pp))
    for malformation in malformations(plan):
        raise UnsoundError(malformation.message)
    flows = flows_of(plan.programs, plan.layout)
    events = merge_events(plan)
    durations = event_durations(plan, events, costs)
    run = build_graph(plan, flows, PROFILES["channel"], events).run(durations)
    if not run.finished:
        plan.check().raise_if_unsound()
        raise UnsoundError("the plan cannot finish: an instruction waits for something that nothing makes")
    chunks = plan.schedule.chunks
    timeline = tuple(_spans(plan, rank, events, run, durations) for rank in range(len(plan.programs)))
    computed = [[span for span in row if isinstance(span.instruction, Compute)] for row in timeline]
    return Simulation(
        plan=plan,
        unit=costs.unit,
        timeline=timeline,
        makespan=max((span.end for row in timeline for span in row), default=0.0),
        busy=tuple(
            sum(durations[events.of[rank][index]] for index, i in enumerate(program) if isinstance(i, Compute)) / chunks
            for rank, program in enumerate(plan.programs)
        ),
        spans=tuple(row[-1].end - row[0].start if row else 0.0 for row in computed),
        peak_activations=peak_activations(plan, flows, costs),
        critical_path=_critical_path(events, run, durations),
    )


def event_durations(plan: Plan, events: Events, costs: Costs) -> list[float]:
    """Return how long each event takes, times the plan's chunks (so that whole numbers stay exact)."""
    chunks = plan.schedule.chunks
    stages = range(len(plan.stage_to_pp))
    forward = [costs.of_chunk("forward", stage, chunks) for stage in stages]
    backward = [
        costs.of_chunk("backward_input", stage, chunks) + costs.of_chunk("backward_weight", stage, chunks)
        for stage in stages
    ]
    message = costs.p2p * chunks

    def duration(instruction: Instruction) -> float:
        if isinstance(instruction, Fwd):
            return forward[instruction.stage]
        if isinstance(instruction, Bwd):
            return backward[instruction.stage]
        return message if isinstance(instruction, Message) else 0.0

    return [duration(plan.programs[first.rank][first.index]) for first, *_ in events.members]


def _spans(plan: Plan, rank: int, events: Events, run: Run, durations: list[float]) -> tuple[Span, ...]:
    chunks = plan.schedule.chunks
    return tuple(
        Span(i, run.start[event] / chunks, (run.start[event] + durations[event]) / chunks)
        for i, event in zip(plan.programs[rank], events.of[rank], strict=True)
    )


def _critical_path(events: Events, run: Run, durations: list[float]) -> tuple[Place, ...]:
    """Walk back from the event that ends last to what it waited for; only events that take time are kept."""
    event = max(range(len(durations)), key=lambda e: run.start[e] + durations[e], default=-1)
    path = []
    while event >= 0:
        if durations[event]:
            path.append(events.members[event][0])
        event = run.cause[event]
    return tuple(reversed(path))
