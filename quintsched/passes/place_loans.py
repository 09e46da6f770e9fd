"""Lend activations to ranks with memory to spare and reclaim them, so that no rank holds more than a cap.

    rank 0   F0 F1 LendAct 0 ┐  F2 …             ┌ ReclaimAct 0  B0 …      cap 2
    rank 3                   └ HoldAct 0  …  ReturnAct 0 ┘                 its own activations and the lent ones: 2

Early ranks of a pipeline hold more than late ones, which is what this evens out (BPipe, Kim et al., ICML 2023). A
rank without memory for a computation lends the activations with the farthest backward, as for offloading, to the rank
that is fastest to reach and has most room until that backward; a rank that lacks room by itself holds none. Each
message is one point in a single order of all events, in which each rank's program is in order: so the plan stays free
of deadlock under blocking sends, whatever else the ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from quintsched.errors import UsageError
from quintsched.graph.event_edges import build_graph
from quintsched.graph.events_and_channels import Events
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_columns import ABSENT, CODES, Amounts, Columns, Ints
from quintsched.ir.instruction_set import COMPUTING, HoldAct, HostCopy, LendAct, ReclaimAct, ReturnAct
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs
from quintsched.passes.place_offloads import ROUNDING, Offloadable, costs_of_kept
from quintsched.simulation.costs import Costs
from quintsched.simulation.instruction_durations import event_durations, loan_times
from quintsched.simulation.simulated_activation_memory import activation_changes, peak_activations, while_running


def place_loans(plan: PlanData, cap: float | None, costs: Costs | None = None) -> PlanData:
    """Add `LendAct`s, `HoldAct`s, `ReturnAct`s and `ReclaimAct`s so that no rank holds more activations than `cap`.

    None adds none. The cap is in the costs' unit of memory, by default microbatches of a whole rank. Raises
    `UsageError` for a cap that the ranks cannot keep together, with the least that they can, and for a plan without
    backwards.
    """
    if cap is None:
        return plan
    costs = costs_of_kept(plan, costs, "lend")
    lent = _LoanInput.from_plan(plan, costs).lent(cap, costs)
    if lent is None:
        raise UsageError(
            f"{plan.schedule.name}: lend is {cap:.10g}, but no other rank has room for what is above it; the least "
            f"that works: {least_cap(plan, costs, cap):.10g}"
        )
    return replace(lent, schedule=replace(plan.schedule, options={**plan.schedule.options, "lend": float(cap)}))


def least_cap(plan: PlanData, costs: Costs | None = None, above: float = 0.0) -> float:
    """Return the least cap above an amount, among those that ranks hold over time, that can be kept by lending."""
    costs = (costs or Costs()).spread(plan.stage_shares, plan.schedule.slices)
    step, peak = _LoanInput.from_plan(plan, costs), max(peak_activations(plan, costs), default=0.0)
    amounts = np.unique(np.concatenate([level / plan.schedule.parts for level in step.levels]))
    candidates = amounts[(amounts > above) & (amounts < peak)].tolist()
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if step.lent(candidates[middle], costs) else (middle + 1, high)
    return float([*candidates, peak][low])


@dataclass(frozen=True, eq=False)
class _LoanInput:
    """Input of the walk: the computations in one order of all events, and what each rank holds without loans.

    `rows` are the computations, and copies to the host and back, in that order; `at` has the position of every row of
    the plan in it. `own[rank]` are the rows of a rank's computations, `levels[rank]` the activations that it holds
    while each runs.
    """

    plan: PlanData
    kept: Offloadable
    at: Ints
    rows: list[int]
    own: list[Ints]
    levels: list[Amounts]
    net: Amounts
    most: Amounts
    time: Callable[[int, int, int], float]

    @classmethod
    def from_plan(cls, plan: PlanData, costs: Costs) -> _LoanInput:
        """Order the events by their times, as far as a transport that blocks allows: each program is in order there."""
        columns, events = plan.columns, Events.merge(plan)
        timed, blocking = (build_graph(events, plan.flows, PROFILES[name]) for name in ("channel", "blocking"))
        order = np.array(blocking.run_events().order)
        start = timed.starts(event_durations(plan, events, costs), order)
        place = np.empty(events.num_events, np.int64)
        place[blocking.in_order(start, order)] = np.arange(events.num_events)
        at, computing = place[events.of], columns.rows_where(*COMPUTING)
        net, most = activation_changes(plan, costs)
        own = [computing[columns.rank[computing] == rank] for rank in range(columns.num_ranks)]
        levels = [while_running(columns, rank, net, most)[rows - columns.first[rank]] for rank, rows in enumerate(own)]
        walked = columns.rows_where(*COMPUTING, HostCopy)
        rows = walked[np.argsort(at[walked], kind="stable")].tolist()

        def time(cell: int, source: int, target: int) -> float:
            return float(loan_times(plan, costs, *map(np.atleast_1d, (cell, source, target)))[0])

        return cls(plan, Offloadable.from_plan(plan, costs), at, rows, own, levels, net, most, time)

    def lent(self, cap: float, costs: Costs) -> PlanData | None:
        """Return the plan in which no rank holds more than a cap, or None if none is found."""
        messages = _LoanWalk(self, cap).messages()
        lent = _with_messages(self.plan, self.at, messages) if messages else self.plan
        fits = messages is not None and max(peak_activations(lent, costs), default=0.0) <= cap * (1 + ROUNDING)
        return lent if fits else None


class _Sent(NamedTuple):
    """A message of lent activations: a stage and unit (`cell`), its end of the loan, and where it goes in the order."""

    cell: int
    comes_back: bool
    lender: int
    holder: int
    before: int


@dataclass(eq=False)
class _Memory:
    """Memory of one rank in the walk: what it holds, and which of its own activations are there, lent, and last made.

    `level` is what it holds at most while each of its computations runs: all of its own, and what others have lent it.
    """

    level: Amounts
    held: float = 0.0
    newest: int = ABSENT
    here: set[int] = field(default_factory=set)
    lent: dict[int, int] = field(default_factory=dict)


class _LoanWalk:
    """Walk through the computations of all ranks, in one order, that keeps each rank's activations under a cap."""

    def __init__(self, step: _LoanInput, cap: float) -> None:
        self._step, self._cap = step, cap * step.plan.schedule.parts * (1 + ROUNDING)
        self._ranks = [_Memory(level.copy()) for level in step.levels]
        self._sent: list[_Sent] = []
        kept = step.kept
        self._makes = {row: cell for cell, row in kept.forwards.items()}
        self._takes = {row: cell for cell, row in kept.backwards.items()}
        self._next = {row: later for own in step.own for row, later in pairwise([*own.tolist(), ABSENT])}

    def messages(self) -> list[_Sent] | None:
        """Walk to the end; return the messages in their order, or None if the cap cannot be kept."""
        rank_of = self._step.plan.columns.rank
        return self._sent if all(self._fits(row, int(rank_of[row])) for row in self._step.rows) else None

    def _fits(self, row: int, rank: int) -> bool:
        """Make room for a computation, and do it; return False if there cannot be room."""
        memory, needed = self._ranks[rank], float(self._step.most[row])
        if row not in self._next:  # a copy to the host, or back, whose memory the plan counts with
            memory.held += float(self._step.net[row])
            return True
        own = self._takes.get(row, ABSENT)
        coming = self._takes.get(self._next[row], ABSENT)
        if own in memory.lent and not self._reclaim(own, row, rank, 0.0, self._movable(memory, own, coming)):
            return False
        if coming in memory.lent:
            others = [cell for cell in self._movable(memory, own) if cell != memory.newest]
            self._reclaim(coming, row, rank, needed, others)
        if not self._make_room(needed, row, rank, self._movable(memory, own, coming)):
            return False
        memory.held += float(self._step.net[row])
        memory.here.discard(own)
        memory.newest = self._makes.get(row, ABSENT)
        if memory.newest != ABSENT:
            memory.here.add(memory.newest)
        return True

    def _movable(self, memory: _Memory, own: int, coming: int = ABSENT) -> list[int]:
        """Return the activations that may be lent, farthest backward first, those of the latest and next one last."""
        last, backwards = (memory.newest, coming), self._step.kept.backwards
        return sorted(memory.here - {own}, key=lambda cell: (cell in last, -backwards[cell]))

    def _reclaim(self, cell: int, row: int, rank: int, needed: float, movable: Sequence[int]) -> bool:
        """Reclaim activations if there is room for them and for `needed` besides; return whether there is."""
        memory, amount = self._ranks[rank], self._step.kept.amounts[cell]
        if not self._make_room(amount + needed, row, rank, movable):
            return False
        holder = memory.lent.pop(cell)
        memory.held += amount
        self._ranks[holder].held -= amount
        self._ranks[holder].level[self._between(cell, holder, row)] -= amount
        self._sent.append(_Sent(cell, True, rank, holder, row))
        return True

    def _make_room(self, needed: float, row: int, rank: int, movable: Sequence[int]) -> bool:
        """Lend activations until there is room; return False, with nothing lent, if there cannot be."""
        memory, kept, loans = self._ranks[rank], self._step.kept, list[_Sent]()
        lacking = memory.held + needed - self._cap
        for cell in movable:
            if lacking <= 0:
                break
            loan = self._loan(cell, row, rank) if kept.amounts[cell] else None
            if loan is not None:
                lacking -= kept.amounts[cell]
                self._hold(loan, kept.amounts[cell])
                loans.append(loan)
        if lacking > 0:
            for loan in loans:
                self._hold(loan, -kept.amounts[loan.cell])
            return False
        for loan in loans:
            memory.held -= kept.amounts[loan.cell]
            memory.here.remove(loan.cell)
            memory.lent[loan.cell] = loan.holder
        self._sent += loans
        return True

    def _loan(self, cell: int, row: int, rank: int) -> _Sent | None:
        """Return the loan of activations from before `row` to the fastest rank with room, or that with most room."""
        found = []
        for other, memory in enumerate(self._ranks):
            level = memory.level[self._window(cell, other, row)]
            room = self._cap - level.max(initial=memory.held) - self._step.kept.amounts[cell]
            if other != rank and room >= 0:
                found.append((self._step.time(cell, rank, other), -room, other))
        return _Sent(cell, False, rank, min(found)[-1], row) if found else None

    def _hold(self, loan: _Sent, amount: float) -> None:
        """Add an amount to what the holder of a loan holds up to its backward."""
        self._ranks[loan.holder].held += amount
        self._ranks[loan.holder].level[self._window(loan.cell, loan.holder, loan.before)] += amount

    def _window(self, cell: int, rank: int, row: int) -> slice:
        """Return the computations beside which a rank holds activations that are lent before `row`: one before, too."""
        found = self._between(cell, rank, row)
        return slice(max(found.start - 1, 0), found.stop)

    def _between(self, cell: int, rank: int, row: int) -> slice:
        """Return the computations of a rank from `row` to the backward of a cell, in the order of all events."""
        at, own = self._step.at, self._step.own[rank]
        return slice(*np.searchsorted(at[own], (at[row], at[self._step.kept.backwards[cell]])).tolist())


def _with_messages(plan: PlanData, at: Ints, messages: Sequence[_Sent]) -> PlanData:
    """Return the plan with both ends of each message, at the message's point of the order of all events."""
    columns, units = plan.columns, plan.schedule.num_units
    ends = []
    for message in sorted(messages, key=lambda message: at[message.before]):
        cell, place = divmod(message.cell, units), at[message.before]
        source, target = message.lender, message.holder
        send, receive = CODES[LendAct], CODES[HoldAct]
        if message.comes_back:
            source, target = target, source
            send, receive = CODES[ReturnAct], CODES[ReclaimAct]
        ends += [(source, send, *cell, target, place), (target, receive, *cell, source, place)]
    rank, op, stage, unit, peer, place = np.array(sorted(ends, key=itemgetter(0)), np.int64).T
    own = [at[rows.start : rows.stop] for rows in map(columns.rows_of, range(columns.num_ranks))]
    before = [columns.first[k] + np.searchsorted(own[k], p) for k, p in zip(rank, place, strict=True)]
    first = np.r_[0, np.cumsum(np.bincount(rank, minlength=columns.num_ranks))]
    block = Columns(first, op.astype(np.uint8), {"stage": stage, "microbatch": unit, "peer": peer})
    return replace(plan, programs=Programs(columns.insert(np.array(before, np.int64), block)))
