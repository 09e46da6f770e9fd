"""Time a plan: the event graph of the `channel` profile, run under a cost model.

Communication overlaps with computation as the runtime does it: a message starts when its value is made and its
channel is free, and only who takes the value waits for it. Collectives among replicas go one after the other, beside
all that; weights are gathered into the room of those dropped before. The gradient norm is one event of all ranks.

    makespan      when the last instruction ends
    bubble        1 - busy / (ranks x makespan)
    span_bubble   (longest span of a rank - its work) / longest span; a span runs from a rank's first forward to
                  its last weight gradient (the measure of the zero-bubble papers, arXiv:2401.10241)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.errors import UnsoundError
from quintsched.graph.plan_events import PROFILES, Events, Run, build_graph
from quintsched.ir.instructions import (
    AMONG_REPLICAS,
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    Compute,
    Fwd,
    GatherParams,
    Instruction,
    Message,
    OptStep,
    Recompute,
    ReduceScatterBucket,
)
from quintsched.plan import Plan
from quintsched.simulation.activation_memory import peak_activations
from quintsched.simulation.costs import Costs
from quintsched.simulation.state_memory import bucket_share, peak_memory, peak_state
from quintsched.verify.wellformed import malformations

Times: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """One instruction of a plan: `index` counts in the program of pp rank `rank`."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True)
class Span:
    """When one instruction runs, in the costs' unit of time."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a run would look like. `start` and `end` have a time per row of the plan's columns."""

    plan: Plan
    costs: Costs
    start: Times
    end: Times
    makespan: float
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    peak_activations: tuple[float, ...]
    critical_path: tuple[Place, ...]

    @cached_property
    def timeline(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each pp rank, in program order."""
        start, end, first = self.start.tolist(), self.end.tolist(), self.plan.columns.first.tolist()
        return tuple(
            tuple(map(Span, program, start[row : row + len(program)], end[row : row + len(program)]))
            for row, program in zip(first[:-1], self.plan.programs, strict=True)
        )

    @property
    def peak_state(self) -> tuple[float, ...]:
        """The most that each pp rank holds of weights, gradients and optimizer state: see `state_memory`."""
        return peak_state(self.plan, self.costs)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each pp rank holds of these and activations together, in the costs' unit of memory."""
        return peak_memory(self.plan, self.costs)

    @property
    def unit(self) -> str:
        """The unit of all times."""
        return self.costs.unit

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
            "slices": self.plan.schedule.slices,
            "unit": self.unit,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "span": self.span,
            "span_bubble": self.span_bubble,
            "peak_activations": list(self.peak_activations),
            "peak_state": list(self.peak_state),
            "peak_memory": list(self.peak_memory),
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
    events = Events.merge(plan)
    durations = event_durations(plan, events, costs)
    run = build_graph(events, plan.flows, PROFILES["channel"]).run(durations.tolist())
    if not run.finished:
        plan.check().raise_if_unsound()
        raise UnsoundError("the plan cannot finish: an instruction waits for something that nothing makes")
    begins, ends = np.array(run.start)[events.of], (np.array(run.start) + durations)[events.of]
    start, end = begins / plan.schedule.parts, ends / plan.schedule.parts
    return Simulation(
        plan=plan,
        costs=costs,
        start=start,
        end=end,
        makespan=float(end.max(initial=0.0)),
        busy=tuple(_busy(plan, durations[events.of])),
        spans=tuple(_spans(plan, begins, ends)),
        peak_activations=peak_activations(plan, costs),
        critical_path=_critical_path(events, run, durations),
    )


def event_durations(plan: Plan, events: Events, costs: Costs) -> Times:
    """Return how long each event takes, times the plan's chunks and slices (so that whole numbers stay exact)."""
    columns, parts = plan.columns, plan.schedule.parts
    durations = np.zeros(len(columns))
    durations[columns.are(Message)] = costs.p2p * parts
    for kind, names in COSTS_OF.items():
        of_stage = [sum(costs.of_part(n, s, parts) for n in names) for s in range(len(plan.stage_to_pp))]
        rows = columns.are(kind)
        durations[rows] = np.array(of_stage)[columns.stage[rows]]
    ranks = range(len(plan.programs))
    durations[columns.are(ClipGrad)] = max(_once(plan, costs, "clip", plan.layout.stages_of(rank)) for rank in ranks)
    for row in np.flatnonzero(columns.are(OptStep)).tolist():
        rank, index = columns.place(row)
        step = plan.programs[rank][index]
        assert isinstance(step, OptStep)
        durations[row] = _once(plan, costs, "optimizer", step.stages)
    for row in np.flatnonzero(columns.are(*AMONG_REPLICAS)).tolist():
        rank, index = columns.place(row)
        durations[row] = _among_replicas(plan, costs, plan.programs[rank][index])
    return durations[events.first_rows]


def _among_replicas(plan: Plan, costs: Costs, i: Instruction) -> float:
    """Return what a collective among replicas takes: all of a stage's weights, or those of a bucket."""
    if isinstance(i, GatherParams):
        return _once(plan, costs, "gather_params", [i.stage])
    assert isinstance(i, AllReduceBucket | ReduceScatterBucket | AllGatherBucket)
    share = bucket_share(plan, costs, i.stage, i.bucket)
    return share * sum(_once(plan, costs, name, [i.stage]) for name in COSTS_OF_BUCKETS[type(i)])


def _once(plan: Plan, costs: Costs, name: str, stages: Iterable[int]) -> float:
    """Return what is done once for these stages, times the plan's chunks and slices."""
    return sum(costs.of_stage(name, stage, plan.schedule.chunks, plan.schedule.slices) for stage in stages)


COSTS_OF: dict[type[Compute], tuple[str, ...]] = {
    Fwd: ("forward",),
    Bwd: ("backward_input", "backward_weight"),
    BwdInput: ("backward_input",),
    BwdWeight: ("backward_weight",),
    Recompute: ("recompute",),
}
"""Which of the costs add up to each computation's."""

COSTS_OF_BUCKETS: dict[type[Instruction], tuple[str, ...]] = {
    AllReduceBucket: ("reduce_scatter", "all_gather"),
    ReduceScatterBucket: ("reduce_scatter",),
    AllGatherBucket: ("all_gather",),
}
"""And to each collective on a bucket."""


def _busy(plan: Plan, durations: Times) -> Iterator[float]:
    """Yield how long each rank computes."""
    columns = plan.columns
    work = np.where(columns.are(Compute), durations, 0.0)
    for rank in range(len(plan.programs)):
        rows = columns.rows_of(rank)
        yield math.fsum(work[rows.start : rows.stop].tolist()) / plan.schedule.parts


def _spans(plan: Plan, begins: Times, ends: Times) -> Iterator[float]:
    """Yield each rank's span, from its first computation to its last; times are still undivided."""
    rows = np.flatnonzero(plan.columns.are(Compute))
    for rank in range(len(plan.programs)):
        own = rows[plan.columns.rank[rows] == rank]
        yield float(ends[own[-1]] - begins[own[0]]) / plan.schedule.parts if len(own) else 0.0


def _critical_path(events: Events, run: Run, durations: Times) -> tuple[Place, ...]:
    """Walk back from the event that ends last to what it waited for; only events that take time are kept."""
    ends = np.array(run.start) + durations
    event = int(ends.argmax()) if len(ends) else -1
    path = []
    while event >= 0:
        if durations[event]:
            path.append(Place(*events.columns.place(int(events.first_rows[event]))))
        event = run.cause[event]
    return tuple(reversed(path))
