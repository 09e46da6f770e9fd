"""Traces: what a run really did, in the words of its plan, and what that says about costs.

    span of an instruction   [wait ···][run ─────────]   then, before the next one, the interpreter's own time
                             start                  end

A cost is an instruction's run time and what follows it until the next instruction starts, sends included, so that a
simulation under the costs of a trace takes as long as what was traced.

    trace = Trace.load(Path("traces"), plan)
    trace.step().timeline            one step of one replica, like `Simulation.timeline`, with waits
    plan.simulate(trace.costs())     the same plan under what its instructions really took
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from quintsched.errors import UsageError, suggest
from quintsched.graph.event_graph import Times
from quintsched.graph.plan_events import Channels
from quintsched.ir.columns import Flags, Ints
from quintsched.ir.instructions import (
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    Compute,
    Fwd,
    HostCopy,
    Instruction,
    Message,
    OptStep,
    Recompute,
    Recv,
)
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulator import Span
from quintsched.trace.trace_json import DIGITS, RankTrace, load_ranks

Kind = TypeVar("Kind", bound=Instruction)

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""The units of a trace's times, and how many of each make a second."""

REALLY_WAITED = 0.1
"""The share of a message's way for which its taker has to wait, or else it had most likely arrived before."""


def per_second(unit: str) -> float:
    """Return how many of a unit make a second; raises `UsageError` for what is no unit of real time."""
    if unit not in UNITS:
        raise UsageError(f"a trace cannot be told in {unit!r}; its costs have to be in {', '.join(UNITS)}")
    return UNITS[unit]


@dataclass(frozen=True, slots=True)
class MeasuredSpan(Span):
    """When an instruction ran, and for how much of that time, at its beginning, it waited for another rank."""

    wait: float


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one pipeline, from the moment its first computation runs."""

    plan: PlanData
    number: int
    unit: str
    timeline: tuple[tuple[MeasuredSpan, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """When the last instruction ends."""
        return max((span.end for row in self.timeline for span in row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each pp rank computes."""
        return tuple(
            math.fsum(span.end - span.start - span.wait for span in row if isinstance(span.instruction, Compute))
            for row in self.timeline
        )

    @property
    def bubble(self) -> float:
        """The share of all ranks' time until the makespan in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    def summary(self) -> dict[str, object]:
        """Return the figures as plain data, for JSON."""
        return {"step": self.number, "unit": self.unit, "makespan": self.makespan, "bubble": self.bubble}


@dataclass(frozen=True)
class Trace:
    """The traces of all ranks of a plan, in the order of ranks."""

    plan: PlanData
    ranks: tuple[RankTrace, ...]

    @classmethod
    def load(cls, directory: Path, plan: PlanData) -> Trace:
        """Read the trace that a run of `plan` left; raises what `trace_json.load_ranks` does."""
        return cls(plan, load_ranks(directory, plan))

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that were recorded."""
        return self.ranks[0].steps

    def makespan(self, step: int, rank: int = 0) -> float:
        """How long a step took the replica of global rank `rank`, in seconds."""
        return self.step(step, rank, "s").makespan

    def step(self, number: int | None = None, rank: int = 0, unit: str = "ms") -> MeasuredStep:
        """Return one step, as the replica of global rank `rank` ran it; by default the one with the median makespan.

        Raises `UsageError` for a step that was not recorded, a rank outside the mesh or an unknown unit.
        """
        self.plan.mesh.coordinates(rank)
        if number is None:
            by_makespan = sorted(self.steps, key=lambda step: self.makespan(step, rank))
            number = by_makespan[(len(by_makespan) - 1) // 2]
        if number not in self.steps:
            raise UsageError(f"step {number} was not recorded{suggest(str(number), map(str, self.steps))}")
        replica = next(place for place, group in enumerate(self._replicas) if rank in group)
        times = self._times.of(replica, self.steps.index(number))
        return MeasuredStep(self.plan, number, unit, _timeline(self.plan, times, per_second(unit)))

    def costs(self, unit: str = "ms") -> Costs:
        """Return what instructions took, per stage: means over a step's microbatches, medians over steps and replicas.

        Only the sum of the halves of a full `Bwd` is known: it is split in equal halves, or, where a stage has both
        kinds of backward, as its split ones are. `ClipGrad` counts from when the last rank has come to it. `p2p` is
        the median, over the messages whose taker waited for them, of the time from the send to the end of the wait;
        0 if nobody waited. `host_bandwidth` is that of the median copy of activations to the host's memory or back.
        """
        return _measure(self.plan, self._times, unit)

    @property
    def _replicas(self) -> list[tuple[int, ...]]:
        return self.plan.mesh.groups("pp")

    @cached_property
    def _times(self) -> _Times:
        return _Times(*(self._stacked(name) for name in ("start", "end", "wait")))

    def _stacked(self, name: str) -> Times:
        """Return the times of all: replicas x steps x rows of the plan's columns."""
        return np.stack(
            [np.concatenate([getattr(self.ranks[r], name) for r in group], axis=1) for group in self._replicas]
        )


@dataclass(frozen=True, eq=False)
class _Times:
    """Seconds: replicas x steps x rows of the plan's columns; or rows only, for one step of one replica."""

    start: Times
    end: Times
    wait: Times

    def of(self, replica: int, step: int) -> _Times:
        return _Times(self.start[replica, step], self.end[replica, step], self.wait[replica, step])


def _timeline(plan: PlanData, times: _Times, scale: float) -> tuple[tuple[MeasuredSpan, ...], ...]:
    """Return the spans of a step by pp rank; what a rank waited before the step's beginning is left out."""
    columns = plan.columns
    running = (times.start + times.wait)[columns.are(Compute)]
    origin = running.min(initial=np.inf) if len(running) else times.start.min(initial=0.0)
    start = np.maximum(times.start - origin, 0.0)
    end = np.maximum(times.end - origin, start)
    wait = np.clip(times.start + times.wait - origin - start, 0.0, end - start)  # what is left out was waiting
    found = [(array * scale).tolist() for array in (start, end, wait)]
    rows = [slice(rows.start, rows.stop) for rows in map(columns.rows_of, range(len(plan.programs)))]
    return tuple(
        tuple(map(MeasuredSpan, program, *(times[own] for times in found)))
        for own, program in zip(rows, plan.programs, strict=True)
    )


def _measure(plan: PlanData, times: _Times, unit: str) -> Costs:
    columns, scale = plan.columns, per_second(unit)
    decimals = DIGITS - round(math.log10(scale))
    until, waited = _handovers(plan, times)
    run = np.maximum(until - times.start - waited, 0.0) * scale

    def of_stages(kind: type[Compute]) -> tuple[list[float], list[int]]:
        return _typical(run, columns.are(kind), columns.stage, len(plan.stage_to_pp))

    found: dict[str, list[float]] = {"forward": of_stages(Fwd)[0]}
    if plan.mode == "train":
        found["backward_input"], found["backward_weight"] = _halves(*map(of_stages, (Bwd, BwdInput, BwdWeight)))
        found["optimizer"] = _optimizer(plan, run)
        found["clip"] = _clip(plan, times.start, until, scale)
    if columns.are(Recompute).any():
        found["recompute"] = of_stages(Recompute)[0]
    rounded = {name: tuple(round(value, decimals) for value in values) for name, values in found.items()}
    link = _host_bandwidth(plan, times, scale)
    return Costs(
        unit=unit, p2p=round(_p2p(plan, times) * scale, decimals), host_latency=0.0, host_bandwidth=link, **rounded
    )


def _handovers(plan: PlanData, times: _Times) -> tuple[Times, Times]:
    """Return until when each instruction occupies its rank, and how much of that it waits.

    That is until the next one starts; sends belong to what stands before them, and receives and copies to the host's
    memory and back occupy nobody.
    """
    columns = plan.columns
    until, waited = times.end.copy(), times.wait.copy()
    beside, is_message = columns.are(Recv, HostCopy), columns.are(Message)
    for rank in range(len(plan.programs)):
        rows = np.array(columns.rows_of(rank))
        own = rows[~beside[rows]]
        places = np.flatnonzero(~is_message[own])
        if len(places):
            heads = own[places]
            until[..., heads[:-1]] = times.start[..., heads[1:]]
            until[..., heads[-1]] = times.end[..., own].max(axis=-1)
            waited[..., heads] = np.add.reduceat(times.wait[..., own], places, axis=-1)
    return until, waited


def _typical(run: Times, rows: Flags, stage: Ints, stages: int) -> tuple[list[float], list[int]]:
    """Return what these rows take per stage (0 where it has none), and how many rows each stage has.

    A step is a sum: within one the mean counts, since times are skewed and sums of medians come out low.
    """
    of_stage = [rows & (stage == number) for number in range(stages)]
    found = [float(np.median(run[..., own].mean(axis=-1))) if own.any() else 0.0 for own in of_stage]
    return found, [int(own.sum()) for own in of_stage]


def _halves(
    full: tuple[list[float], list[int]], inputs: tuple[list[float], list[int]], weights: tuple[list[float], list[int]]
) -> tuple[list[float], list[float]]:
    """Return both halves of a backward per stage, so that all backwards of the stage together take their time."""
    found = []
    for whole, num_whole, given, num_split, weight in zip(*full, *inputs, weights[0], strict=True):
        split = given + weight
        total = (whole * num_whole + split * num_split) / max(num_whole + num_split, 1)
        share = given / split if split else 0.5
        found.append((total * share, total * (1 - share)))
    return [given for given, _ in found], [weight for _, weight in found]


def _optimizer(plan: PlanData, run: Times) -> list[float]:
    """Return a step of the optimizer per stage; one that steps several stages is shared out equally."""
    found = [0.0] * len(plan.stage_to_pp)
    for row, step in _rows_of(plan, OptStep):
        for stage in step.stages:
            found[stage] = float(np.median(run[..., row])) / len(step.stages)
    return found


def _clip(plan: PlanData, start: Times, until: Times, scale: float) -> list[float]:
    """Return the global norm's time per stage: a rank's, from when the last rank comes to it, shared out equally.

    What a rank does for the whole batch right before (reducing, sharing metrics) is part of it.
    """
    found = [0.0] * len(plan.stage_to_pp)
    rows = [row for row, _ in _rows_of(plan, ClipGrad)]
    begins = [_first_of_batch(plan, row) for row in rows]
    for row in rows:
        latest = start[..., begins].max(axis=(0, 2))
        took = float(np.median(np.maximum(until[..., row] - latest, 0.0))) * scale
        stages = plan.layout.stages_of(int(plan.columns.rank[row]))
        for stage in stages:
            found[stage] = took / len(stages)
    return found


def _first_of_batch(plan: PlanData, row: int) -> int:
    """Return the first row of the stretch before `row` that works for the whole batch and has no cost of its own."""
    rank, index = plan.columns.place(row)
    program = plan.programs[rank]
    first = index
    while first and not isinstance(program[first - 1], Compute | Message | ClipGrad | OptStep):
        first -= 1
    return row - index + first


def _rows_of(plan: PlanData, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    for row in np.flatnonzero(plan.columns.are(kind)).tolist():
        rank, index = plan.columns.place(row)
        instruction = plan.programs[rank][index]
        assert isinstance(instruction, kind)
        yield row, instruction


def _host_bandwidth(plan: PlanData, times: _Times, scale: float) -> float | None:
    """Return the speed of a link that copies activations as fast as the median of all copies; None: in no time."""
    took = (times.end - times.start)[..., plan.columns.rows_where(HostCopy)] * scale * plan.schedule.parts
    typical = float(np.median(took)) if took.size else 0.0
    return 1 / typical if typical > 0 else None


def _p2p(plan: PlanData, times: _Times) -> float:
    """Return the median of the ways of the messages that were waited for, in seconds."""
    sent, received = Channels.of(plan.columns).pairs
    way = np.maximum(times.end[..., received] - times.end[..., sent], 0.0)
    wait = times.wait[..., received]
    known = way[(wait > 0) & (wait >= REALLY_WAITED * way)]
    return float(np.median(known)) if known.size else 0.0
