"""Costs measured by a trace: the time that each instruction of a plan took.

    [wait ···][run ─────────] ── [next
              ╰── a cost ──────╯

A cost is an instruction's run time plus all time until the next instruction starts, sends included. So a simulation
under the costs of a trace takes as long as the traced run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from quintsched.errors import UsageError
from quintsched.graph.event_graph import Times
from quintsched.graph.events_and_channels import Channels
from quintsched.ir.instruction_columns import Flags, Ints
from quintsched.ir.instruction_set import (
    AMONG_REPLICAS,
    COMPUTING,
    LOANS,
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
from quintsched.simulation.cost_forms import Link, PerUnit, Wires
from quintsched.simulation.costs import Costs
from quintsched.trace.hidden_communication import Alone, Pairs, unit_factors
from quintsched.trace.trace_json import DIGITS

InstructionT = TypeVar("InstructionT", bound=Instruction)

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Units of a trace's times, with the number of each per second."""

REALLY_WAITED = 0.1
"""Minimum fraction of a message's transfer during which its consumer waited; below it, it had likely arrived before."""

OF_LOANS = 1e6
"""Bandwidth of wires that take the outputs of stages, of size 1, in no time beyond their latency."""

ANOTHER_LINK = 0.1
"""Relative deviation of a pair of ranks' messages from the usual time that gives them a link of their own."""

FACTOR_DIGITS = 4
"""Decimals of the factors of microbatches."""

FORWARDS, BACKWARDS, RECOMPUTES = (Fwd,), (Bwd, BwdInput, BwdWeight), (Recompute,)

COMPUTES_BY_COST: dict[str, tuple[type[Compute], ...]] = {
    "forward": FORWARDS,
    "exchange": FORWARDS,
    "backward_input": BACKWARDS,
    "backward_weight": BACKWARDS,
    "exchange_backward": BACKWARDS,
    "recompute": RECOMPUTES,
}
"""Computations from which the factors of each cost are taken."""
COSTS_BY_COMPUTES: dict[tuple[type[Compute], ...], tuple[str, ...]] = {
    FORWARDS: ("forward",),
    BACKWARDS: ("backward_input", "backward_weight"),
    RECOMPUTES: ("recompute",),
}
"""Costs that make up the time of these computations."""
LEAST_CELL = 0.01
"""Least difference from 1 of a factor of a stage and a unit; if all are smaller, they are left out."""


def per_second(unit: str) -> float:
    """Return the number of a unit per second; raises `UsageError` for other units than those of real time."""
    if unit not in UNITS:
        raise UsageError(f"a trace cannot be told in {unit!r}; its costs have to be in {', '.join(UNITS)}")
    return UNITS[unit]


@dataclass(frozen=True, eq=False)
class RowTimes:
    """Times in seconds: (replicas, steps, rows of the plan's columns); or (rows,), for one step of one replica."""

    start: Times
    end: Times
    wait: Times

    def of_step(self, replica: int, step: int) -> RowTimes:
        """Times of one step of one replica."""
        return RowTimes(self.start[replica, step], self.end[replica, step], self.wait[replica, step])


def measure(plan: PlanData, times: RowTimes, unit: str, per_microbatch: bool) -> Costs:
    """Return the costs measured by a trace, see `Trace.costs`; raises `UsageError` for another unit of time."""
    scale = per_second(unit)
    times = replace(times, start=_in_turn(plan, times))
    decimals = DIGITS - round(math.log10(scale))
    until, waited = _handovers(plan, times)
    run = np.maximum(until - times.start - waited, 0.0) * scale
    factors, usual = _factors(plan, run) if per_microbatch else ({}, run)
    found = _of_stages(plan, usual)
    if plan.mode == "train":
        found["optimizer"] = _optimizer(plan, run)
        found["clip"] = _clip(plan, times.start, until, scale)
    rounded: dict[str, Any] = {n: tuple(round(value, decimals) for value in values) for n, values in found.items()}
    overlaps, more = bool(len(Pairs.from_columns(plan.columns))), dict[str, PerUnit]()
    for name, kinds in COMPUTES_BY_COST.items():
        if kinds in factors and name in rounded:
            by_slice = _by_slice(plan, factors[kinds])
            usual_of = np.sum([found[cost] for cost in COSTS_BY_COMPUTES[kinds]], axis=0)
            cells = None if overlaps else _cells(_took(plan, run, kinds), usual_of, by_slice)
            more[name] = PerUnit(stages=rounded[name], cells=cells, **by_slice)
    rounded |= more
    link = _host_bandwidth(plan, times, scale)
    rounded |= {} if link is None else {"host_bandwidth": link}
    rounded["p2p"] = p2p = _p2p(plan, times, scale, decimals)
    if loan := _loan(plan, times) * scale * plan.schedule.parts:
        rounded |= sized_loans(loan, p2p)
    return Costs(unit=unit, **rounded)


def _in_turn(plan: PlanData, times: RowTimes) -> Times:
    """Return the starts of instructions, those of reductions not before the end of the computation before them."""
    columns, start = plan.columns, times.start.copy()
    computing, rows = columns.rows_where(*COMPUTING), columns.rows_where(*AMONG_REPLICAS)
    before = computing[np.maximum(np.searchsorted(computing, rows) - 1, 0)]
    known = (before < rows) & (columns.rank[before] == columns.rank[rows])
    rows, before = rows[known], before[known]
    start[..., rows] = np.maximum(start[..., rows], times.end[..., before])
    return start


def _of_stages(plan: PlanData, run: Times) -> dict[str, list[float]]:
    """Return the times of computations per stage, and, for overlapped ones, of their exchanges."""
    columns, pairs = plan.columns, Pairs.from_columns(plan.columns)
    found: dict[str, list[float]] = {"forward": _of_kind(plan, run, Fwd)[0]}
    if plan.mode == "train":
        found["backward_input"], found["backward_weight"] = _halves(*_backwards(plan, run))
    if len(pairs):
        found |= pairs.costs(run, _alone(plan, run))
    if columns.are(Recompute).any():
        found["recompute"] = _of_kind(plan, run, Recompute)[0]
        exchanged = found.get("exchange", [0.0] * len(found["recompute"]))
        found["recompute"] = [max(took - x, 0.0) for took, x in zip(found["recompute"], exchanged, strict=True)]
    return found


def _of_kind(plan: PlanData, run: Times, kind: type[Compute]) -> tuple[list[float], list[int]]:
    return _typical(run, plan.columns.are(kind), plan.columns.stage, len(plan.stage_to_pp))


def _backwards(plan: PlanData, run: Times) -> list[tuple[list[float], list[int]]]:
    return [_of_kind(plan, run, kind) for kind in BACKWARDS]


def _alone(plan: PlanData, run: Times) -> Alone:
    """Return the times of computations that do not overlap with another one."""
    forward, num_forward = _of_kind(plan, run, Fwd)
    whole, inputs, weights = _backwards(plan, run)
    backward_input, backward_weight = map(np.array, _halves(whole, inputs, weights))
    num_backward = np.add(whole[1], inputs[1])
    return Alone(np.array(forward), np.array(num_forward), backward_input, backward_weight, num_backward)


def _factors(plan: PlanData, run: Times) -> tuple[dict[tuple[type[Compute], ...], Times], Times]:
    """Return the factors of units on the usual time of computations, and the rows' times divided by them."""
    columns, pairs, layout = plan.columns, Pairs.from_columns(plan.columns), plan.layout
    took = {kinds: _took(plan, run, kinds) for kinds in COMPUTES_BY_COST.values()}
    visits = {kinds: layout.visits_all & (layout.recomputing | (kinds is not RECOMPUTES)) for kinds in took}
    found = {kinds: unit_factors(of_kinds, visits[kinds]) for kinds, of_kinds in took.items()}
    if not len(pairs):
        return found, run
    alone = _alone(plan, run)
    found[FORWARDS], found[BACKWARDS], of_pairs = pairs.factors(run, alone, took[FORWARDS], took[BACKWARDS])
    of_rows = np.ones(len(columns))
    of_rows[pairs.rows] = of_pairs
    for kinds, of_units in found.items():
        rows = columns.rows_where(*kinds)
        of_rows[rows] = of_units[columns.unit[rows]]
    return found, run / np.where(of_rows > 0, of_rows, 1.0)


def _took(plan: PlanData, run: Times, kinds: tuple[type[Compute], ...]) -> Times:
    """Return the times of computations of these kinds that run alone: (stages, units)."""
    columns = plan.columns
    rows = columns.rows_where(*kinds)
    took = np.zeros((len(plan.stage_to_pp), plan.schedule.num_units))
    if len(rows):
        np.add.at(took, (columns.stage[rows], columns.unit[rows]), np.median(run[..., rows], axis=(0, 1)))
    return took


def _cells(took: Times, usual: Times, factors: dict[str, tuple[float, ...]]) -> tuple[tuple[float, ...], ...] | None:
    """Return the factors of stages and units, (stages, units), beyond those of units; None if all are about 1."""
    of_units = np.outer(factors["microbatches"], factors.get("slices", (1.0,))).ravel()
    expected = usual[:, None] * of_units
    cells = np.divide(took, expected, out=np.ones_like(took), where=(took > 0) & (expected > 0))
    if np.abs(cells - 1).max(initial=0.0) < LEAST_CELL:
        return None
    return tuple(map(tuple, np.round(cells, FACTOR_DIGITS).tolist()))


def _by_slice(plan: PlanData, of_units: Times) -> dict[str, tuple[float, ...]]:
    """Return the factors per microbatch and per slice."""
    by_slice = of_units.reshape(plan.schedule.microbatches, -1)
    found = {"microbatches": by_slice.mean(axis=1)}
    if plan.schedule.slices > 1:
        found["slices"] = by_slice.mean(axis=0)
    return {name: tuple(np.round(factors, FACTOR_DIGITS).tolist()) for name, factors in found.items()}


def _handovers(plan: PlanData, times: RowTimes) -> tuple[Times, Times]:
    """Return until when each instruction occupies its rank, and how long it waits in that time.

    It occupies the rank until the next one starts. Sends count to the instruction before them; receives, and copies to
    host memory and back, occupy no time.
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
    """Return the typical time of these rows per stage (0 if it has none), and the number of rows of each stage.

    Within a step the mean counts, as a step is a sum: times are skewed, and sums of medians would be too low.
    """
    of_stage = [rows & (stage == number) for number in range(stages)]
    found = [float(np.median(run[..., own].mean(axis=-1))) if own.any() else 0.0 for own in of_stage]
    return found, [int(own.sum()) for own in of_stage]


def _halves(
    full: tuple[list[float], list[int]], inputs: tuple[list[float], list[int]], weights: tuple[list[float], list[int]]
) -> tuple[list[float], list[float]]:
    """Return both halves of a backward per stage, such that the total time of all its backwards is preserved."""
    found = []
    for whole, num_whole, given, num_split, weight in zip(*full, *inputs, weights[0], strict=True):
        split = given + weight
        total = (whole * num_whole + split * num_split) / max(num_whole + num_split, 1)
        share = given / split if split else 0.5
        found.append((total * share, total * (1 - share)))
    return [given for given, _ in found], [weight for _, weight in found]


def _optimizer(plan: PlanData, run: Times) -> list[float]:
    """Return the time of an optimizer step per stage; a step of several stages is divided equally."""
    found = [0.0] * len(plan.stage_to_pp)
    for row, step in _rows_of(plan, OptStep):
        for stage in step.stages:
            found[stage] = float(np.median(run[..., row])) / len(step.stages)
    return found


def _clip(plan: PlanData, start: Times, until: Times, scale: float) -> list[float]:
    """Return the time of the global norm per stage: from the arrival of the last rank, divided equally among stages.

    Work for the whole batch right before it (reductions, metrics) is included.
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
    """Return the first row of the run of instructions before `row` that have no cost of their own."""
    rank, index = plan.columns.place(row)
    program = plan.programs[rank]
    first = index
    while first and not _has_a_cost(program[first - 1]):
        first -= 1
    return row - index + first


def _has_a_cost(i: Instruction) -> bool:
    return i.computes or isinstance(i, Message | ClipGrad | OptStep)


def _rows_of(plan: PlanData, kind: type[InstructionT]) -> Iterator[tuple[int, InstructionT]]:
    for row in np.flatnonzero(plan.columns.are(kind)).tolist():
        rank, index = plan.columns.place(row)
        instruction = plan.programs[rank][index]
        assert isinstance(instruction, kind)
        yield row, instruction


def _host_bandwidth(plan: PlanData, times: RowTimes, scale: float) -> float | None:
    """Return the bandwidth at which a copy takes the median time of all copies; None if copies take no time."""
    took = (times.end - times.start)[..., plan.columns.rows_where(HostCopy)] * scale * plan.schedule.parts
    typical = float(np.median(took)) if took.size else 0.0
    return 1 / typical if typical > 0 else None


def _p2p(plan: PlanData, times: RowTimes, scale: float, decimals: int) -> float | Wires:
    """Return the median transfer time of messages that were waited for, with links for pairs of ranks that differ."""
    channels = Channels.from_columns(plan.columns)
    sent, received = channels.pairs
    way, known = _ways(times, sent, received)
    known &= ~plan.columns.are(*LOANS)[sent]
    if not known.any():
        return 0.0
    usual, found = float(np.median(way[known])), dict[tuple[int, int], float]()
    sources, destinations = plan.columns.rank[sent], plan.columns.rank[received]
    for source, destination in zip(channels.sources.tolist(), channels.destinations.tolist(), strict=True):
        waited = known & (sources == source) & (destinations == destination)
        if waited.any():
            found[source, destination] = float(np.median(way[waited]))
    others = {pair for pair, took in found.items() if abs(took - usual) > ANOTHER_LINK * usual}
    links = tuple(
        Link(source=source, destination=destination, latency=round(took * scale, decimals))
        for (source, destination), took in found.items()
        if others & {(source, destination), (destination, source)}
    )
    latency = round(usual * scale, decimals)
    return Wires(latency=latency, links=links) if links else latency


def sized_loans(loan: float, p2p: float | Wires) -> dict[str, Any]:
    """Return the costs of messages with lent activations that take so long, beside those of stages' outputs."""
    if not isinstance(p2p, Wires) and p2p:
        return {"activation_message": round(loan / p2p, DIGITS)}
    wires = p2p if isinstance(p2p, Wires) else Wires()
    links = tuple(link.model_copy(update={"bandwidth": OF_LOANS}) for link in wires.links)
    return {
        "p2p": wires.model_copy(update={"bandwidth": OF_LOANS, "links": links}),
        "activation_message": max(loan - wires.latency, 0.0) * OF_LOANS,
    }


def _loan(plan: PlanData, times: RowTimes) -> float:
    """Return the median transfer time of lent activations that were waited for, or of all if none were; 0 without any.

    Their receives are posted when there is memory for them, which may be after they were sent.
    """
    sent, received = Channels.from_columns(plan.columns).pairs
    way, known = _ways(times, sent, received)
    way = np.minimum(way, times.end[..., received] - times.start[..., received])
    loans = np.broadcast_to(plan.columns.are(*LOANS)[sent], way.shape)
    known = known & loans if (known & loans).any() else loans
    return float(np.median(way[known])) if known.any() else 0.0


def _ways(times: RowTimes, sent: Ints, received: Ints) -> tuple[Times, Flags]:
    """Return the time from the end of each send to that of its receive, and a mask of those really waited for."""
    way = np.maximum(times.end[..., received] - times.end[..., sent], 0.0)
    wait = times.wait[..., received]
    return way, (wait > 0) & (wait >= REALLY_WAITED * way)
