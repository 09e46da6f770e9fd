"""Replay of a recorded step: the same order of computation, timed again from the parts that it was measured to have.

    wait for the input ··│ copy │ message │ pause │ computing ─────│
                         ╰────────────── duration ─────────────────╯

`computing` is what a rank computes; of a backward that recomputes, both, as if the second followed the first at once.
`pauses` are the times before it in which the rank neither computes nor waits, `receiving` those where it takes a
message from another rank, and `copying` those where it waits for copies to the host or back alone. `wires` are the
times that a message is on its way while its receiver waits, beyond that; none is then later than it was. Arrays have
the shape (kinds, stages, microbatches), with the kinds and the microbatches of `order_problem`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from quintsched.errors import InputError
from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_set import BwdInput, Recompute
from quintsched.plan import Plan
from quintsched.recorded_runs.recorded_run import UNIT, RecordedStep
from quintsched.simulation.cost_forms import Link, PerUnit, Wires
from quintsched.simulation.costs import Costs
from quintsched.solve.order_problem import FORWARD, INPUT_HALF, WEIGHT_HALF
from quintsched.solve.order_timing import Timing, timed
from quintsched.solve.recorded.better_order import orders_of, problem_of_plan
from quintsched.solve.search_problem import Orders, Problem

UNUSUAL = 2.0
"""Multiple of the usual time to take a message, beyond which a rank pauses for other reasons."""
SKEW = 0.02
"""Most fraction of a step by which clocks may be seen to differ; those of a traced cluster differed by 0.02 %."""
NAMES = ("forward", "backward_input", "backward_weight")
"""Costs of the kinds of computations."""


class Parts(NamedTuple):
    """Measured parts of a step; `wires` has a time for each pair of ranks, (pp, pp)."""

    computing: Times
    pauses: Times
    receiving: Times
    copying: Times
    wires: Times

    @property
    def durations(self) -> Times:
        """Time that each computation occupies its rank."""
        return self.computing + self.pauses + self.receiving + self.copying


class GapBefore(NamedTuple):
    """Time before a computation of a rank, which starts by its own recomputation (`lead`) before it needs its input.

    `since` is when the rank had ended what it computed before, `free` when copies had ended, too; `made` is when the
    input was made.
    """

    number: int
    wire: tuple[int, int] | None
    since: float
    free: float
    made: float
    start: float
    lead: float

    @property
    def waited(self) -> bool:
        """Whether the rank waited for the input."""
        return self.made - self.lead > self.free

    @property
    def lasts(self) -> float:
        """Time from when the rank was free, and the input made, to the start."""
        return self.after(self.made)

    @property
    def used(self) -> float:
        """Time when the input was used."""
        return self.start + self.lead

    def after(self, arrival: float) -> float:
        """Return the time from when the rank was free, and the input there, to the start."""
        return max(0.0, self.start - max(self.free, arrival - self.lead))

    def copying_after(self, arrival: float) -> float:
        """Return the time in which the rank waited for copies alone, with the input there."""
        return max(0.0, self.free - max(self.since, arrival - self.lead))


@dataclass(frozen=True)
class RecordedProblem:
    """One step as a problem of the solver, with the measured times; whole backwards take no time for weight halves.

    Of each computation: start, end, the recomputation in it, and the end of the copies that it has waited for.
    """

    plan: Plan
    step: RecordedStep
    problem: Problem
    orders: Orders
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    recomputing: tuple[float, ...]
    copied: tuple[float, ...]

    @classmethod
    def from_step(cls, plan: Plan, step: RecordedStep) -> RecordedProblem:
        """Return the recording of a step of a plan.

        Raises:
            UnsoundError: a plan that the solver does not search.
            InputError: ranks' clocks do not agree.
        """
        problem = problem_of_plan(plan)
        starts, ends, again = ([0.0] * len(problem.durations) for _ in range(3))
        copied, first = [-math.inf] * len(starts), min(row[0].start for row in step.rows)
        for row in step.rows:
            recomputed, waited = 0.0, -math.inf
            for span in row:
                waited = max(waited, span.copied - first)
                if isinstance(span.instruction, Recompute):
                    recomputed = span.end - span.start
                    continue
                for place, number in enumerate(problem.numbers([span.instruction])):
                    starts[number] = (span.end if place else span.start - recomputed) - first
                    ends[number] = span.end - first
                    again[number], copied[number] = (0.0 if place else recomputed), waited
                recomputed, waited = 0.0, -math.inf
        orders = orders_of(problem, plan)
        found = cls(plan, step, problem, orders, tuple(starts), tuple(ends), tuple(again), tuple(copied))
        found._require_one_clock()
        return found

    def _require_one_clock(self) -> None:
        """Raise InputError where a computation starts long before its input exists."""
        problem = self.problem
        apart = [
            (self.ends[needed] - self.starts[number] - self.leads[number], number)
            for number, needed in enumerate(problem.needs)
            if needed >= 0
        ]
        early, number = max(apart, default=(0.0, 0))
        if early > SKEW * self.step.makespan:
            i, needed = problem.computation(number), problem.computation(problem.needs[number])
            ranks = problem.ranks[number], problem.ranks[problem.needs[number]]
            raise InputError(
                f"step {self.step.number}: rank {ranks[0]} runs {i} {early:.3g} {UNIT} before its input is made, by "
                f"{needed} of rank {ranks[1]}: their clocks differ; put the times of all ranks on one clock"
            )

    @property
    def has_whole_backwards(self) -> bool:
        """Whether all backwards were run as one."""
        return not any(isinstance(span.instruction, BwdInput) for row in self.step.rows for span in row)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the arrays."""
        return 3, self.problem.num_stages, self.problem.microbatches

    @cached_property
    def leads(self) -> tuple[float, ...]:
        """Time by which each computation starts before it needs the output of another one: its own recomputation."""
        return tuple(np.where(np.array(self.problem.leads) > 0, self.recomputing, 0.0).tolist())

    @cached_property
    def places(self) -> dict[int, int]:
        """Place of each computation in its rank's order."""
        return {number: place for order in self.orders for place, number in enumerate(order)}

    @cached_property
    def gaps(self) -> tuple[GapBefore, ...]:
        """Gaps of all ranks; the weight half of a whole backward has none, nor has the first computation of a step."""
        return tuple(self._gaps())

    def _gaps(self) -> Iterator[GapBefore]:
        problem, whole = self.problem, self.has_whole_backwards
        for rank, order in enumerate(self.orders):
            is_late = problem.needs[order[0]] < 0 and self.starts[order[0]] > 0  # it could begin with the step
            free = 0.0 if is_late else -math.inf
            for number in order:
                needed = problem.needs[number]
                source = problem.ranks[needed] if needed >= 0 else rank
                is_rest = whole and problem.place_of(number)[0] == WEIGHT_HALF
                made = self.ends[needed] if source != rank else -math.inf
                if not is_rest and max(free, made) > -math.inf:
                    wire, start = (source, rank) if source != rank else None, self.starts[number]
                    copied = max(free, min(self.copied[number], start))
                    yield GapBefore(number, wire, free, copied, made, start, self.leads[number])
                free = self.ends[number]

    @cached_property
    def computing(self) -> Times:
        """Time of each computation."""
        return np.subtract(self.ends, self.starts).reshape(self.shape)

    @cached_property
    def parts(self) -> Parts:
        """Measured parts: the message times of each pair of ranks are medians, all else is as it was."""
        pauses, receiving, copying = np.zeros((3, len(self.starts)))
        wires = np.zeros((self.problem.pp, self.problem.pp))
        usual = self._usual_receiving()
        for wire in sorted({gap.wire for gap in self.gaps if gap.wire}):
            mine = [gap for gap in self.gaps if gap.wire == wire]
            waited = _median([gap.lasts for gap in mine if gap.waited])
            on_its_way = waited - self._before_any(wire, otherwise=usual)
            wires[wire] = max(0.0, min(on_its_way, self._longest_wire(mine)))
            arrival = 0.0
            for gap in mine:
                arrival = max(arrival, gap.made) + wires[wire]
                copying[gap.number] = gap.copying_after(arrival)
                receiving[gap.number] = min(gap.after(arrival), UNUSUAL * usual)
                pauses[gap.number] = gap.after(arrival) - receiving[gap.number]
        for gap in self.gaps:
            if not gap.wire:
                pauses[gap.number] += gap.lasts
                copying[gap.number] = gap.copying_after(gap.made)
        shape = self.shape
        return Parts(self.computing, pauses.reshape(shape), receiving.reshape(shape), copying.reshape(shape), wires)

    def _usual_receiving(self) -> float:
        """Return the time that ranks take for a message that is there: the median of ranks, each with its median.

        A rank that has waited for all messages takes at most the time since they were made.
        """
        there, coming, most = dict[int, list[float]](), dict[tuple[int, int], list[float]](), dict[int, float]()
        for gap in self.gaps:
            if gap.wire and gap.waited:
                coming.setdefault(gap.wire, []).append(gap.lasts)
            elif gap.wire:
                there.setdefault(gap.wire[1], []).append(gap.lasts)
        for (_, rank), lasts in coming.items():
            most[rank] = min(_median(lasts), most.get(rank, math.inf))
        return _median(list((most | {rank: _median(lasts) for rank, lasts in there.items()}).values()))

    def _before_any(self, wire: tuple[int, int], otherwise: float) -> float:
        """Return the median gap of a receiver that has not waited, but before messages of a wire that may be full."""
        found = [
            gap.lasts
            for gap in self.gaps
            if self.problem.ranks[gap.number] == wire[1] and gap.wire != wire and not gap.waited
        ]
        return _median(found) if found else otherwise

    @staticmethod
    def _longest_wire(messages: Sequence[GapBefore]) -> float:
        """Return the longest time of messages, one after the other, by which all are there when they were used."""
        made, used = (np.array([getattr(gap, name) for gap in messages]) for name in ("made", "used"))
        first, last = np.triu_indices(len(messages))
        return float(((used[last] - made[first]) / (last - first + 1)).min())

    @cached_property
    def message_time(self) -> float:
        """Median time of a message: from when its receiver is free, and it was made, to when it is there."""
        return _median([gap.lasts for gap in self.gaps if gap.wire])

    def replay(self, parts: Parts) -> Timing:
        """Time the recorded order with these parts."""
        return timed(self._problem(parts), self.orders)

    def _problem(self, parts: Parts) -> Problem:
        ranks, needs = np.array(self.problem.ranks), np.array(self.problem.needs)
        lags = np.where(needs >= 0, parts.wires[ranks[needs], ranks], 0.0)
        times = self.computing.ravel()
        shares = np.divide(self.leads, times, out=np.zeros_like(times), where=times > 0)
        leads = tuple((parts.computing.ravel() * shares).tolist())
        durations = tuple(parts.durations.ravel().tolist())
        return replace(self.problem, durations=durations, lags=tuple(lags.tolist()), leads=leads)

    @property
    def without_messages(self) -> float:
        """Makespan of the replay with computations alone."""
        none = np.zeros(self.shape)
        return self.replay(Parts(self.computing, none, none, none, np.zeros_like(self.parts.wires))).makespan

    @property
    def with_one_message_time(self) -> float:
        """Makespan of the replay with pauses, and each message as long as the median one."""
        pauses, receiving = np.zeros((2, len(self.starts)))
        for gap in self.gaps:
            pauses[gap.number] = 0.0 if gap.wire else gap.lasts
            receiving[gap.number] = self.message_time if gap.wire else 0.0
        parts = self.parts._replace(pauses=pauses.reshape(self.shape), receiving=receiving.reshape(self.shape))
        return self.replay(parts._replace(wires=self.parts.wires * 0)).makespan

    def costs(self, *, split: bool) -> Costs:
        """Return the costs of each stage and microbatch; with `split`, whole backwards are two halves, equally long.

        Copies to the host are not in them. Where a stage has not recomputed, that is taken to last as its forward does.
        """
        durations = self.parts.durations - self.parts.copying
        again = np.reshape(self.recomputing, self.shape)[INPUT_HALF]
        durations[INPUT_HALF] -= again
        if split and self.has_whole_backwards:
            durations[WEIGHT_HALF] = durations[INPUT_HALF] = durations[INPUT_HALF] / 2
        times = {name: self._per_unit(of_kind) for name, of_kind in zip(NAMES, durations, strict=True)}
        if self.problem.recompute:
            times["recompute"] = self._per_unit(np.where(again > 0, again, durations[FORWARD]))
        wires = self.parts.wires
        pairs = np.argwhere((wires > 0) | (wires.T > 0)).tolist()
        links = tuple(Link(source=a, destination=b, latency=float(wires[a, b])) for a, b in pairs)
        p2p = Wires(links=links) if links else 0.0
        return Costs(unit=UNIT, p2p=p2p, **times)

    def _per_unit(self, times: Times) -> PerUnit:
        """Return a cost that has these values, (stages, microbatches of their route)."""
        means = times.mean(axis=1, keepdims=True)
        cells: Times = np.divide(times, means, out=np.ones_like(times), where=means > 0)
        if self.problem.routes > 1:
            routes = np.arange(len(cells)) * self.problem.routes // len(cells)
            own = np.arange(self.problem.routes)[:, None] == routes
            cells = np.concatenate([np.where(mine[:, None], cells, 1.0) for mine in own], axis=1)
        return PerUnit(stages=tuple(means[:, 0].tolist()), cells=tuple(map(tuple, cells.tolist())))


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
