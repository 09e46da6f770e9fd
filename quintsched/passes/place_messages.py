"""Place every send together with its receive at one point of a single global order.

Each rank's program is that order with everything of the other ranks left out. So no cycle can arise, even where
every call blocks the host until its partner has come: the order itself is a run of the whole.

    global order   F0@0  (0→1: a0)  F1@0  F0@1  (0→1: a1)  …
    rank 0         F0    SendAct 0  F1          SendAct 1
    rank 1               RecvAct 0        F0    RecvAct 1

The order is that in which a simulated run at unit costs produces the messages, with at most two messages of a
channel received and not yet taken. Messages of a channel go in the order in which the receiver takes them: then
neither that limit nor the channel's order ever makes the run wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from quintsched.errors import UnsoundError
from quintsched.graph.plan_events import PROFILES, Events, build_graph, first_maker
from quintsched.ir.columns import Ints
from quintsched.ir.instructions import Fwd, Instruction, RecvAct, RecvGrad, SendAct, SendGrad
from quintsched.ir.values import TRAVELS
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulator import Times, event_durations
from quintsched.text.listing import excerpt

RECEIVES_OUTSTANDING = 2

BEFORE, COMPUTE, AFTER = 0, 1, 2
"""At one moment: messages first, then computations, then messages that waited for one of these to begin."""


def place_messages(plan: Plan) -> Plan:
    """Add sends and receives to a plan of computations; raises `UnsoundError` if these wait for each other."""
    columns = plan.columns
    events = Events.merge(plan)
    graph = build_graph(events, plan.flows, PROFILES["channel"])
    durations = event_durations(plan, events, Costs())
    run = graph.run(durations.tolist())
    if not run.finished:
        raise UnsoundError(_explain_order(plan, np.array(run.waiting)[events.of]))
    start = np.array(run.start)[events.of]
    messages = _Messages.of(plan)
    times, phases = messages.moments(start, start + durations[events.of])
    ends = [*messages.instructions(plan), *chain.from_iterable(plan.programs)]
    rank = np.concatenate([messages.source, messages.target, columns.rank])
    order = np.lexsort(
        (
            np.concatenate([messages.number, messages.number, np.arange(len(columns))]),
            np.concatenate([phases, phases, np.full(len(columns), COMPUTE)]),
            np.concatenate([times, times, start]),
            rank,
        )
    )
    lines = np.split(order, np.searchsorted(rank[order], np.arange(1, len(plan.programs))))
    return replace(plan, programs=tuple(tuple(ends[i] for i in line.tolist()) for line in lines))


@dataclass(frozen=True)
class _Messages:
    """What crosses from rank to rank: an entry per message, channel after channel, as the receiver takes them.

    `made` and `taken` are rows of the plan, `number` is the entry's place in this order.
    """

    source: Ints
    target: Ints
    made: Ints
    taken: Ints

    @classmethod
    def of(cls, plan: Plan) -> _Messages:
        """Find every value that is made on one rank and taken on another."""
        flows, rank = plan.flows, plan.columns.rank
        nowhere = np.zeros(len(rank), np.int64)
        taken = flows.consumes.rows
        made = first_maker(flows.produces, nowhere, nowhere[taken], flows.consumes.keys)
        crosses = (made >= 0) & (rank[made] != rank[taken]) & flows.of_kind(flows.consumes.keys, *TRAVELS)
        made, taken = made[crosses], taken[crosses]
        order = np.lexsort((taken, rank[taken], rank[made]))
        made, taken = made[order], taken[order]
        return cls(rank[made], rank[taken], made, taken)

    @property
    def number(self) -> Ints:
        """The place of each message in the order of channels."""
        return np.arange(len(self.made))

    def moments(self, start: Times, end: Times) -> tuple[Times, Ints]:
        """Return each message's time and phase in the global order; `start` and `end` are those of the rows."""
        num_ranks = int(max(self.source.max(initial=0), self.target.max(initial=0))) + 1
        channel = self.source * num_ranks + self.target
        older = np.maximum(self.number - RECEIVES_OUTSTANDING, 0)
        has_older = (self.number >= RECEIVES_OUTSTANDING) & (channel[older] == channel) if len(channel) else channel
        freed = np.where(has_older, start[self.taken[older]], -1.0)
        times = np.maximum(end[self.made], freed)
        for first, last in pairwise([0, *(np.flatnonzero(np.diff(channel)) + 1).tolist(), len(channel)]):
            np.maximum.accumulate(times[first:last], out=times[first:last])
        return times, np.where(freed == times, AFTER, BEFORE)

    def instructions(self, plan: Plan) -> Iterator[Instruction]:
        """Yield all sends, then all receives."""
        columns = plan.columns
        forward = columns.are(Fwd)[self.taken]
        stage, unit = columns.stage[self.made].tolist(), columns.unit[self.made].tolist()
        following = columns.stage[self.taken].tolist()
        ends = list(
            zip(forward.tolist(), stage, following, unit, self.source.tolist(), self.target.tolist(), strict=True)
        )
        for is_activation, here, _, microbatch, _, target in ends:
            yield SendAct(here, microbatch, target) if is_activation else SendGrad(here, microbatch, target)
        for is_activation, _, there, microbatch, source, _ in ends:
            yield RecvAct(there, microbatch, source) if is_activation else RecvGrad(there, microbatch, source)


def _explain_order(plan: Plan, waiting: Ints) -> str:
    """Name what each rank is stuck at, the first computation of it that never begins, and what that waits for."""
    columns, flows = plan.columns, plan.flows
    stuck, lines = [], []
    for rank in range(len(plan.programs)):
        rows = columns.rows_of(rank)
        row = next((row for row in rows if waiting[row]), None)
        if row is None:
            continue
        stuck.append(columns.place(row))
        for key in flows.consumes.keys[flows.consumes.rows == row].tolist():
            makers = flows.produces.rows[flows.produces.keys == key]
            late = [int(maker) for maker in makers if waiting[maker]]
            if late:
                lines.append(
                    f"rank {rank} is stuck at {_at(plan, row)}: it needs {flows.value(key)}; {_maker(plan, late[0])}"
                )
                break
    head = f"not sound: {plan.title}\ndeadlock: the order of computation itself cannot run"
    return "\n".join([head, *lines, *excerpt(plan, stuck)])


def _at(plan: Plan, row: int) -> str:
    rank, index = plan.columns.place(row)
    return f"{index} {plan.programs[rank][index]}"


def _maker(plan: Plan, row: int) -> str:
    return f"rank {plan.columns.place(row)[0]} makes it at {_at(plan, row)}"
