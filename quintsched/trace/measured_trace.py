"""Trace of a run, and the timelines and costs derived from it.

span of an instruction   [wait ···][run ─────────]   then, before the next one, the interpreter's overhead
                         start                  end

trace = Trace.load(Path("traces"), plan)
trace.step().timeline            one step of one replica, like `Simulation.timeline`, with waits
plan.simulate(trace.costs())     the same plan under the measured costs
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from quintsched.errors import InputError, UsageError, counted, suggest
from quintsched.formats.run_plan import plan_beside
from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_set import COMPUTING
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs
from quintsched.simulation.notebook_html import figures, heading, rows_of, timeline_svg
from quintsched.simulation.simulator import Span
from quintsched.simulation.time_window import range_ends
from quintsched.trace.measured_costs import RowTimes, measure, per_second
from quintsched.trace.trace_json import RankTrace, load_ranks

MOST_STEPS_SHOWN = 20
"""Most recorded steps that a notebook lists."""


@dataclass(frozen=True, slots=True)
class MeasuredSpan(Span):
    """Measured span of an instruction; during `wait`, at its beginning, it waited for another rank."""

    wait: float

    @property
    def runs(self) -> float:
        """Time at which the instruction runs, after its wait."""
        return self.start + self.wait


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one pipeline (one replica), from the start of its first computation."""

    plan: PlanData
    number: int
    unit: str
    timeline: tuple[tuple[MeasuredSpan, ...], ...]
    began_s: float
    """Time of day at which its times begin, on the clock that all ranks share."""

    @cached_property
    def makespan(self) -> float:
        """End of the last instruction."""
        return max((span.end for row in self.timeline for span in row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Computation time of each pp rank."""
        return tuple(
            math.fsum(span.end - span.runs for span in row if span.instruction.computes) for row in self.timeline
        )

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time until the makespan in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    def __repr__(self) -> str:
        times = f"makespan {self.makespan:.4g} {self.unit}, bubble {self.bubble:.1%}"
        return f"MeasuredStep({self.plan.title}, step {self.number}: {times})"

    def _repr_html_(self) -> str:
        """Return the figures and the timeline as HTML, for notebooks."""
        rows = [("makespan", f"{self.makespan:.4g} {self.unit}"), ("bubble", f"{self.bubble:.1%}")]
        title = heading(f"{self.plan.title}: measured, step {self.number}")
        return f"<div>{title}{figures(rows)}{self._drawn()}</div>"

    def _drawn(self) -> str:
        spans = [span for row in self.timeline for span in row]
        runs, ends = np.array([span.runs for span in spans]), np.array([span.end for span in spans])
        return timeline_svg(self.plan, runs, ends, self.unit)

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON data."""
        return {"step": self.number, "unit": self.unit, "makespan": self.makespan, "bubble": self.bubble}


@dataclass(frozen=True)
class Trace:
    """Traces of all ranks of a plan, in order of rank."""

    plan: PlanData
    ranks: tuple[RankTrace, ...]

    @classmethod
    def load(cls, directory: Path, plan: PlanData) -> Trace:
        """Read the trace of a run of `plan`; raises as `trace_json.load_ranks` does."""
        return cls(plan, load_ranks(directory, plan))

    @classmethod
    def load_run(cls, directory: Path) -> Trace:
        """Read the trace of a run with the plan beside it; raises also `InputError` where there is none."""
        found = plan_beside(directory)
        if found is None:
            raise InputError(f"{directory}: no plan of a run in this directory, which holds a trace with its plan.json")
        return cls.load(directory, found[1])

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps."""
        return self.ranks[0].steps

    def __repr__(self) -> str:
        return f"Trace({self.plan.title}: {counted(len(self.ranks), 'rank')}, steps {', '.join(map(str, self.steps))})"

    def _repr_html_(self) -> str:
        """Return the recorded steps, and the timeline of that of median length, as HTML for notebooks."""
        steps = [self.step(number) for number in self.steps[:MOST_STEPS_SHOWN]]
        rows = [(str(step.number), f"{step.makespan:.4g} {step.unit}", f"{step.bubble:.1%}") for step in steps]
        return f"<div>{rows_of(('step', 'makespan', 'bubble'), rows)}{self.step()._repr_html_()}</div>"

    def makespan(self, step: int, rank: int = 0) -> float:
        """Duration of a step on the replica of global rank `rank`, in seconds."""
        return self.step(step, rank, "s").makespan

    def step(self, number: int | None = None, rank: int = 0, unit: str = "ms") -> MeasuredStep:
        """Return one step of the replica of global rank `rank`; by default the one with the median makespan.

        Raises `UsageError` for a step that was not recorded, a rank outside the mesh or an unknown unit.
        """
        self.plan.mesh.coordinates(rank)
        if number is None:
            by_makespan = sorted(self.steps, key=lambda step: self.makespan(step, rank))
            number = by_makespan[(len(by_makespan) - 1) // 2]
        if number not in self.steps:
            raise UsageError(f"step {number} was not recorded{suggest(str(number), map(str, self.steps))}")
        replica = next(place for place, group in enumerate(self._replicas) if rank in group)
        times = self._times.of_step(replica, self.steps.index(number))
        origin = _origin(self.plan, times)
        timeline = _timeline(self.plan, times, origin, per_second(unit))
        return MeasuredStep(self.plan, number, unit, timeline, origin)

    def select(self, steps: str, rank: int = 0, unit: str = "ms") -> tuple[MeasuredStep, ...]:
        """Return the recorded steps of a range as users give it, "7" or "4..7"; raises `UsageError` for none."""
        first, last = range_ends("--steps", steps)
        found = [number for number in self.steps if first <= number <= last]
        if not found:
            recorded = ", ".join(map(str, self.steps))
            raise UsageError(f"--steps {steps}: none of these was recorded; the trace has {recorded}")
        return tuple(self.step(number, rank, unit) for number in found)

    def costs(self, unit: str = "ms", *, per_microbatch: bool = False) -> Costs:
        """Return the measured costs per stage: means over a step's microbatches, medians over steps and replicas.

        The halves of a full `Bwd` are not measured separately: the sum is split equally, or, if a stage has both kinds
        of backward, in the ratio of its split ones. `ClipGrad` counts from the arrival of the last rank. `p2p` is the
        median, over messages whose consumer waited for them, of the time from the send to the end of the wait; 0 if
        none waited. Pairs of ranks whose messages took much longer or shorter get a link of their own. `host_bandwidth`
        is that of the median copy of activations to host memory or back.

        With `per_microbatch`, computations also have factors per microbatch (and slice), averaged over the stages: one
        set for forwards, one for recomputations and one for both halves of backwards. Disturbances at the same
        microbatch of most steps are included.
        """
        return measure(self.plan, self._times, unit, per_microbatch)

    @property
    def _replicas(self) -> list[tuple[int, ...]]:
        return self.plan.mesh.groups("pp")

    @cached_property
    def _times(self) -> RowTimes:
        return RowTimes(*(self._stacked(name) for name in ("start", "end", "wait")))

    def _stacked(self, name: str) -> Times:
        """Return the times of all ranks: (replicas, steps, rows of the plan's columns)."""
        return np.stack(
            [np.concatenate([getattr(self.ranks[r], name) for r in group], axis=1) for group in self._replicas]
        )


def _origin(plan: PlanData, times: RowTimes) -> float:
    """Return when the first computation of a step runs."""
    running = (times.start + times.wait)[plan.columns.are(*COMPUTING)]
    return float(running.min(initial=np.inf) if len(running) else times.start.min(initial=0.0))


def _timeline(plan: PlanData, times: RowTimes, origin: float, scale: float) -> tuple[tuple[MeasuredSpan, ...], ...]:
    """Return the spans of a step by pp rank; waits before its origin are left out."""
    columns = plan.columns
    start = np.maximum(times.start - origin, 0.0)
    end = np.maximum(times.end - origin, start)
    wait = np.clip(times.start + times.wait - origin - start, 0.0, end - start)  # time before the origin was waiting
    found = [(array * scale).tolist() for array in (start, end, wait)]
    rows = [slice(rows.start, rows.stop) for rows in map(columns.rows_of, range(len(plan.programs)))]
    return tuple(
        tuple(map(MeasuredSpan, program, *(times[own] for times in found)))
        for own, program in zip(rows, plan.programs, strict=True)
    )
