"""Placement of messages: every send together with its receive at one point of a single global order.

Each rank's program is the projection of that order to the rank. So no cycle can arise, even if every call blocks the
host until its partner comes: the global order itself is a valid run.

    global order   F0@0  (0→1: a0)  F1@0  F0@1  (0→1: a1)  …
    rank 0         F0    SendAct 0  F1          SendAct 1
    rank 1               RecvAct 0        F0    RecvAct 1

The order is that of the messages in a simulated run at unit costs. A channel holds received but unconsumed messages
for at most two computations (one message each, unless skips are sent too). Messages of a channel go in the order in
which the receiver consumes them; so neither that limit nor the channel's order ever delays the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from quintsched.errors import UnsoundError
from quintsched.graph.event_edges import build_graph
from quintsched.graph.event_graph import Times
from quintsched.graph.events_and_channels import Events
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_columns import ABSENT, CODES, Columns, Ints
from quintsched.ir.instruction_set import (
    Recv,
    RecvAct,
    RecvGrad,
    RecvSkip,
    RecvSkipGrad,
    Send,
    SendAct,
    SendGrad,
    SendSkip,
    SendSkipGrad,
)
from quintsched.ir.instruction_values import SKIPS, ValueKind
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs
from quintsched.simulation.costs import Costs
from quintsched.simulation.instruction_durations import event_durations
from quintsched.text.plan_listing import excerpt

RECEIVES_OUTSTANDING = 2

MESSAGE_CLASSES: dict[ValueKind, tuple[type[Send], type[Recv]]] = {
    ValueKind.OUTPUT: (SendAct, RecvAct),
    ValueKind.OUTPUT_GRAD: (SendGrad, RecvGrad),
    ValueKind.SKIP: (SendSkip, RecvSkip),
    ValueKind.SKIP_GRAD: (SendSkipGrad, RecvSkipGrad),
}
"""Send and receive classes for each kind of value that travels."""

BEFORE, COMPUTE, AFTER = 0, 1, 2
"""Phases of one moment: messages, then computations, then messages that waited for a computation to start."""


def place_messages(plan: PlanData) -> PlanData:
    """Add sends and receives to a plan of computations; raises `UnsoundError` if the computations have a cycle."""
    columns = plan.columns
    events = Events.merge(plan)
    durations = event_durations(plan, events, Costs())
    graph = build_graph(events, plan.flows, PROFILES["channel"])
    run = graph.run_events()
    if not run.finished:
        raise UnsoundError(_explain_order(plan, np.array(run.waiting)[events.of]))
    start = graph.starts(durations, np.array(run.order))[events.of]
    messages = _Messages.from_plan(plan)
    times, phases = messages.moments(start, start + durations[events.of])
    rank = np.concatenate([messages.source, messages.target, columns.rank])
    order = _sorted(
        rank,
        np.concatenate([times, times, start]),
        np.concatenate([phases, phases, np.full(len(columns), COMPUTE)]),
        np.concatenate([messages.number, messages.number, np.arange(len(columns))]),
    )
    first = np.r_[0, np.cumsum(np.bincount(rank, minlength=columns.num_ranks))]
    return replace(plan, programs=Programs(messages.beside(plan).take_rows(order, first)))


def _sorted(rank: Ints, times: Times, phases: Ints, numbers: Ints) -> Ints:
    """Return the order by rank, time, phase and number; faster if all four fit into one integer, as at unit costs."""
    whole = times.astype(np.int64)
    spans = [int(column.max(initial=0)) + 1 for column in (rank, whole, phases, numbers)]
    if np.array_equal(whole, times) and spans[0] * spans[1] * spans[2] * spans[3] < 2**63:
        return np.argsort(((rank * spans[1] + whole) * spans[2] + phases) * spans[3] + numbers)
    return np.lexsort((numbers, phases, times, rank))


@dataclass(frozen=True, eq=False)
class _Messages:
    """Values that cross ranks: one entry per message, channel after channel, in the receiver's order.

    `made` and `taken` are the producing and consuming rows, `keys` the values' keys, `number` the entry's index.
    """

    source: Ints
    target: Ints
    made: Ints
    taken: Ints
    keys: Ints

    @classmethod
    def from_plan(cls, plan: PlanData) -> _Messages:
        """Find every value that is produced on one rank and consumed on another."""
        flows, rank = plan.flows, plan.columns.rank
        keys = flows.keys(flows.consumes.places)
        travels = keys < flows.numbering.num_travelling
        taken, keys = flows.consumes.rows[travels], keys[travels]
        made = flows.first_senders[keys]
        crosses = (made != ABSENT) & (rank[made] != rank[taken])
        made, taken, keys = made[crosses], taken[crosses], keys[crosses]
        channel = rank[made] * plan.columns.num_ranks + rank[taken]
        order = np.argsort(channel * len(rank) + taken, kind="stable")
        made, taken = made[order], taken[order]
        return cls(rank[made], rank[taken], made, taken, keys[order])

    @property
    def number(self) -> Ints:
        """Index of each message."""
        return np.arange(len(self.made))

    def moments(self, start: Times, end: Times) -> tuple[Times, Ints]:
        """Return each message's time and phase in the global order, given the `start` and `end` times of all rows."""
        num_ranks = int(max(self.source.max(initial=0), self.target.max(initial=0))) + 1
        channel = self.source * num_ranks + self.target
        begins = np.flatnonzero(np.r_[True, (np.diff(channel) != 0) | (np.diff(self.taken) != 0)][: len(channel)])
        taker = np.searchsorted(begins, self.number, side="right") - 1
        older = begins[np.maximum(taker - RECEIVES_OUTSTANDING, 0)] if len(begins) else taker
        has_older = (taker >= RECEIVES_OUTSTANDING) & (channel[older] == channel)
        freed = np.where(has_older, start[self.taken[older]], -1.0)
        times = np.maximum(end[self.made], freed)
        for first, last in pairwise([0, *(np.flatnonzero(np.diff(channel)) + 1).tolist(), len(channel)]):
            np.maximum.accumulate(times[first:last], out=times[first:last])
        return times, np.where(freed == times, AFTER, BEFORE)

    def beside(self, plan: PlanData) -> Columns:
        """Return all sends, all receives and the computations, in this order, as if they were one rank's program."""
        columns, count = plan.columns, len(self.keys)
        sends, receives = np.zeros((2, count), np.uint8)
        sent, received, unit, skip = np.full((4, count), ABSENT)
        for kind, (send, receive) in MESSAGE_CLASSES.items():
            here = plan.flows.numbering.of_kind(self.keys, kind)
            if here.any():
                sends[here], receives[here] = CODES[send], CODES[receive]
                sent[here], received[here], unit[here], skip[here] = _ends(plan, kind, self.keys[here])
        op = np.concatenate([sends, receives, columns.op])
        fields = {
            "stage": np.concatenate([sent, received, columns.stage]),
            "microbatch": np.concatenate([unit, unit, columns.unit]),
            "peer": np.concatenate([self.target, self.source, np.full(len(columns), ABSENT)]),
        }
        for name in columns.columns.keys() - fields.keys():
            fields[name] = np.r_[np.full(2 * count, ABSENT), columns.column(name)]
        if plan.skips:
            skip[skip != ABSENT] += len(columns.table)
            fields["skip"] = np.concatenate([skip, skip, np.full(len(columns), ABSENT)])
        return Columns(np.array([0, len(op)]), op, fields, (*columns.table, *plan.layout.skip_numbers))


def _ends(plan: PlanData, kind: ValueKind, keys: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (sending stages, receiving stages, microbatches, skips) of messages that carry values of a kind."""
    numbering, layout = plan.flows.numbering, plan.layout
    stage, unit, skip = numbering.stages(keys, kind), numbering.numbers(keys, kind), np.full(len(keys), ABSENT)
    if kind in SKIPS:
        unit, skip = np.divmod(unit, len(plan.skips))
        before = np.full((len(plan.skips), len(plan.stage_to_pp)), ABSENT)
        for number, earlier, later in layout.skip_hops if kind is ValueKind.SKIP else layout.skip_chains:
            before[number, later] = earlier
        stage, other = before[skip, stage], stage
    else:
        other = layout.all_after(stage, unit)
    return (stage, other, unit, skip) if kind in (ValueKind.OUTPUT, ValueKind.SKIP) else (other, stage, unit, skip)


def _explain_order(plan: PlanData, waiting: Ints) -> str:
    """Return the explanation of a cycle: per rank the first computation that never starts, and the value it needs."""
    columns, flows = plan.columns, plan.flows
    stuck, lines = [], []
    for rank in range(columns.num_ranks):
        row = next((row for row in columns.rows_of(rank) if waiting[row]), None)
        if row is None:
            continue
        stuck.append(columns.place(row))
        for _, place in flows.consumes.of_rows(row, row + 1):
            value = flows.value_at(place)
            key = int(flows.keys(np.array([place]))[0])
            makers = flows.produces.rows[flows.keys(flows.produces.places) == key]
            late = [int(maker) for maker in makers if waiting[maker]]
            if late:
                at = plan.columns.place_in_words(row)
                lines.append(f"rank {rank} is stuck at {at}: it needs {value}; {_maker(plan, late[0])}")
                break
    head = f"not sound: {plan.title}\ndeadlock: the order of computation itself cannot run"
    return "\n".join([head, *lines, *excerpt(plan, stuck)])


def _maker(plan: PlanData, row: int) -> str:
    return f"rank {plan.columns.place(row)[0]} makes it at {plan.columns.place_in_words(row)}"
