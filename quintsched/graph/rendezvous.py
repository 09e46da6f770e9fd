"""Does a plan run to its end where every call blocks until its partner has come? The `blocking` profile, exactly.

    rank 0   …  SendAct ▶ waits …………… done           a rank walks its program and stops at an event
    rank 1   …  Fwd  ……………  ▶ RecvAct, done           until all of its members have come to it

With no wildcard receive, the order in which ranks are looked at does not matter: one walk decides. It is the event
graph of one queue per rank, which is slower to build; that one says why, where this one stops.
"""

from __future__ import annotations

import numpy as np

from quintsched.graph.plan_events import Events
from quintsched.ir.columns import Ints
from quintsched.ir.plan_data import PlanData


def meeting_order(plan: PlanData) -> Ints | None:
    """Return an order in which the events of a plan can run, each rank in the order of its program; None if none is.

    O(instructions). Plans remember it.
    """
    return plan.remember("meeting order", lambda: _order(Events.merge(plan)))


def _order(events: Events) -> Ints | None:
    members = np.bincount(events.of, minlength=events.num_events)
    shared = np.flatnonzero(members[events.of] > 1)
    moments = _moments(events, shared, members)
    if moments is None:
        return None
    columns = events.columns
    latest = np.full(len(columns), -1)  # the row of the last meeting up to here, on the same rank
    latest[shared] = shared
    latest = np.maximum.accumulate(latest) if len(latest) else latest
    met = latest >= columns.first[columns.rank]
    moment = np.where(met, moments[events.of[latest]], 0)[events.first_rows]
    return np.argsort(moment * len(columns) + events.first_rows)


def _moments(events: Events, shared: Ints, members: Ints) -> Ints | None:
    """Return when each event that ranks share takes place, counted from 1; None if some never do.

    `shared` are the rows of such events, `members` says how many rows each event has.
    """
    position = np.searchsorted(shared, events.columns.first)
    position, ends = position[:-1].tolist(), position[1:].tolist()
    meeting, missing = events.of[shared].tolist(), members.tolist()
    last: dict[int, int] = {}  # the rank that came last to an event that still waits for others
    before: dict[tuple[int, int], int] = {}  # and who came before a rank, where there are more than two
    ready, moments, now = list(range(len(ends))), [0] * len(missing), 0
    while ready:
        rank = ready.pop()
        here, end = position[rank], ends[rank]
        while here < end:
            event = meeting[here]
            here += 1
            missing[event] -= 1
            if missing[event]:
                if event in last:
                    before[event, rank] = last[event]
                last[event] = rank
                position[rank] = here
                break
            now += 1
            moments[event] = now
            other: int | None = last.pop(event)
            while other is not None:
                ready.append(other)
                other = before.pop((event, other), None) if before else None
        else:
            position[rank] = end + 1
    return np.array(moments) if all(at > end for at, end in zip(position, ends, strict=True)) else None
