"""Simulator: times a plan by running the event graph of the `channel` profile under a cost model.

Communication overlaps with computation as in the runtime. A message starts when its value exists and its channel is
free, and only the consumer of the value waits for it. Offloading copies start at the end of their forward, one after
the other; the next computation after the place where their memory is freed waits for them. Fetches are awaited by their
backward. Collectives among replicas run one after the other beside all that; a bucket's begins as soon as the last
backward of its stage has filled it (`early_reductions`). Weights are gathered into the memory of those freed before,
and the next backward waits for the memory of full gradients (ZeRO-2, 3). The gradient norm is one event of all ranks.

    makespan      end of the last instruction
    bubble        1 - busy / (ranks x makespan)
    span_bubble   (longest span of a rank - its work) / longest span; a span runs from a rank's first forward to
                  its last weight gradient (the measure of the zero-bubble papers, arXiv:2401.10241)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from quintsched.errors import UnsoundError
from quintsched.graph.blocking_transport import meeting_order
from quintsched.graph.event_edges import build_graph
from quintsched.graph.event_graph import NONE, Times
from quintsched.graph.events_and_channels import Events
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_set import COMPUTING, Instruction
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs
from quintsched.simulation.early_reductions import TimedGraph, reduce_early
from quintsched.simulation.instruction_durations import event_durations, exposed_exchanges
from quintsched.simulation.notebook_html import figures, heading, timeline_svg
from quintsched.simulation.simulated_activation_memory import peak_activations, peak_host
from quintsched.simulation.simulated_weights_grads_optimizer_memory import peak_memory, peak_state


@dataclass(frozen=True)
class InstructionPlace:
    """Position of an instruction: `index` in the program of pp rank `rank`."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of one instruction, in the costs' unit of time."""

    instruction: Instruction
    start: float
    end: float

    @property
    def runs(self) -> float:
        """Time at which the instruction runs: what is measured may wait before that."""
        return self.start


class TimedRun(Protocol):
    """A simulation or a measured step."""

    @property
    def plan(self) -> PlanData:
        """Plan that ran."""

    @property
    def timeline(self) -> Sequence[Sequence[Span]]:
        """Spans of each pp rank, in program order."""

    @property
    def makespan(self) -> float:
        """End of the last instruction."""


@dataclass(frozen=True)
class Simulation:
    """Simulated run. `start` and `end` have one time per row of the plan's columns.

    They follow from plan and costs, so simulations of equal plans under equal costs compare equal without them.
    """

    plan: PlanData
    costs: Costs
    start: Times = field(compare=False)
    end: Times = field(compare=False)
    makespan: float
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    peak_activations: tuple[float, ...]

    def __repr__(self) -> str:
        peak = max(self.peak_activations, default=0.0)
        times = f"makespan {self.makespan:g} {self.unit}, bubble {self.bubble:.1%}, peak activations {peak:g}"
        return f"Simulation({self.plan.title}: {times})"

    def _repr_html_(self) -> str:
        """Return the figures and the timeline as HTML, for notebooks."""
        rows = [
            ("makespan", f"{self.makespan:g} {self.unit}"),
            ("bubble", f"{self.bubble:.1%}"),
            ("span bubble", f"{self.span_bubble:.1%}"),
            ("peak activations", f"{max(self.peak_activations, default=0.0):g}"),
        ]
        drawn = timeline_svg(self.plan, self.start, self.end, self.unit)
        return f"<div>{heading(self.plan.title)}{figures(rows)}{drawn}</div>"

    @cached_property
    def timeline(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of each pp rank, in program order."""
        start, end, columns = self.start.tolist(), self.end.tolist(), self.plan.columns
        return tuple(
            tuple(map(Span, program, start[rows.start : rows.stop], end[rows.start : rows.stop]))
            for rows, program in zip(map(columns.rows_of, range(columns.num_ranks)), self.plan.programs, strict=True)
        )

    @cached_property
    def critical_path(self) -> tuple[InstructionPlace, ...]:
        """Critical path: from the event that ends last back to the predecessor that ended last, and so on.

        Of several that ended together, the one that runs last in the order of the event graph; only events that take
        time are listed.
        """
        events = Events.merge(self.plan)
        timed = timed_graph(self.plan, events, self.costs)
        ends, order = timed.times()[1], timed.graph.run_events().order
        node, path = (int(ends.argmax()) if len(ends) else NONE), []
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        while node != NONE:
            before = timed.graph.latest(node, ends, place)
            if ends[node] > (ends[before] if before != NONE else 0.0):
                row = int(events.first_rows[timed.of[node]])
                path.append(InstructionPlace(*events.columns.place(row)))
            node = before
        return tuple(reversed(path))

    @property
    def peak_host(self) -> tuple[float, ...]:
        """Peak of activations of each pp rank in host memory, in microbatches of a whole rank."""
        return peak_host(self.plan, self.costs)

    @property
    def exchange(self) -> tuple[float, ...]:
        """Part of each pp rank's busy time that is communication inside stages not hidden by computation."""
        return exposed_exchanges(self.plan, self.costs)

    @property
    def peak_state(self) -> tuple[float, ...]:
        """Peak of weights, gradients and optimizer state of each pp rank.

        See `simulated_weights_grads_optimizer_memory`.
        """
        return peak_state(self.plan, self.costs)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Peak of these and activations together on each pp rank, in the costs' unit of memory."""
        return peak_memory(self.plan, self.costs)

    @property
    def unit(self) -> str:
        """Unit of all times."""
        return self.costs.unit

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time until the makespan in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def span(self) -> float:
        """Longest span of a rank: from its first forward to its last weight gradient."""
        return max(self.spans)

    @property
    def span_bubble(self) -> float:
        """(longest span - that rank's work) / longest span."""
        longest = max(range(len(self.spans)), key=self.spans.__getitem__)
        return 1 - self.busy[longest] / self.span if self.span else 0.0

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON data."""
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
            "exchange": list(self.exchange),
            "peak_activations": list(self.peak_activations),
            "peak_host": list(self.peak_host),
            "peak_state": list(self.peak_state),
            "peak_memory": list(self.peak_memory),
            "critical_path": path,
        }


def simulate(plan: PlanData, costs: Costs | None = None) -> Simulation:
    """Simulate a plan under `costs` (default: unit costs).

    The plan has to be well-formed. Raises `UnsoundError` if it cannot finish, `InputError` for costs that do not fit.
    """
    costs = costs or Costs()
    costs.check_fits(plan.schedule, len(plan.stage_to_pp), plan.columns.num_ranks)
    costs = costs.spread(plan.stage_shares, plan.schedule.slices)
    events = Events.merge(plan)
    timed = timed_graph(plan, events, costs)
    begins, ends = (times[events.of] for times in timed.times())
    start, end = begins / plan.schedule.parts, ends / plan.schedule.parts
    return Simulation(
        plan=plan,
        costs=costs,
        start=start,
        end=end,
        makespan=float(end.max(initial=0.0)),
        busy=tuple(_busy(plan, timed.durations[events.of])),
        spans=tuple(_spans(plan, begins, ends)),
        peak_activations=peak_activations(plan, costs),
    )


def timed_graph(plan: PlanData, events: Events, costs: Costs) -> TimedGraph:
    """Return the event graph of a plan with its times; raises `UnsoundError` if it cannot finish."""
    graph = build_graph(events, plan.flows, PROFILES["channel"], frees_gradients=plan.zero.shards_gradients)
    order = meeting_order(plan)
    if order is None or not graph.agrees(order):
        run = graph.run_events()
        if not run.finished:
            raise UnsoundError("the plan cannot finish: an instruction waits for something that nothing makes")
        order = np.array(run.order)
    durations = event_durations(plan, events, costs)
    timed = TimedGraph(graph, durations, order, np.arange(graph.num_events))
    return reduce_early(plan, events, costs, timed)


def _busy(plan: PlanData, durations: Times) -> Iterator[float]:
    """Yield the computation time of each rank."""
    columns = plan.columns
    work = np.where(columns.are(*COMPUTING), durations, 0.0)
    for rows in map(columns.rows_of, range(columns.num_ranks)):
        yield math.fsum(work[rows.start : rows.stop].tolist()) / plan.schedule.parts


def _spans(plan: PlanData, begins: Times, ends: Times) -> Iterator[float]:
    """Yield each rank's span, from its first computation to its last; the given times are not yet divided by parts."""
    rows = plan.columns.rows_where(*COMPUTING)
    bounds = np.searchsorted(rows, plan.columns.first).tolist()
    for first, end in pairwise(bounds):
        yield float(ends[rows[end - 1]] - begins[rows[first]]) / plan.schedule.parts if end > first else 0.0
