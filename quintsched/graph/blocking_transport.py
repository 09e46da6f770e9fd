"""Exact decision for the `blocking` profile: can a plan run to its end if every call blocks until its partner comes?

    rank 0   …  SendAct ▶ waits …………… done           each rank walks its program and stops at an event
    rank 1   …  Fwd  ……………  ▶ RecvAct, done           until all members of the event have reached it

Without wildcard receives the order in which ranks advance does not matter, so one walk decides. It is equivalent to
the event graph with one queue per rank, and faster to compute; but only that graph gives the cycle if a plan fails.
"""

from __future__ import annotations

import numpy as np

from quintsched.graph.events_and_channels import Events
from quintsched.ir.instruction_columns import Ints
from quintsched.ir.plan_data import PlanData


def meeting_order(plan: PlanData) -> Ints | None:
    """Return an order in which the events of a plan can run, each rank in program order; None if there is none.

    O(instructions). Plans cache it.
    """
    return plan.remember("meeting order", lambda: _order(Events.merge(plan)))


def _order(events: Events) -> Ints | None:
    members = np.bincount(events.of, minlength=events.num_events)
    shared = np.flatnonzero(members[events.of] > 1)
    moments = _moments(events, shared, members)
    if moments is None:
        return None
    columns = events.columns
    latest = np.full(len(columns), -1)  # row of the last shared event up to here, on the same rank
    latest[shared] = shared
    latest = np.maximum.accumulate(latest) if len(latest) else latest
    met = latest >= columns.first[columns.rank]
    moment = np.where(met, moments[events.of[latest]], 0)[events.first_rows]
    return np.argsort(moment * len(columns) + events.first_rows)


def _moments(events: Events, shared: Ints, members: Ints) -> Ints | None:
    """Return the logical time, from 1, at which each event shared by ranks takes place; None if one never does.

    `shared` lists the rows of such events, `members` the number of rows of each event.
    """
    position = np.searchsorted(shared, events.columns.first)
    position, ends = position[:-1].tolist(), position[1:].tolist()
    meeting, missing = events.of[shared].tolist(), members.tolist()
    last: dict[int, int] = {}  # event → the rank that reached it last, while others are missing
    before: dict[tuple[int, int], int] = {}  # (event, rank) → the rank that reached it before, for events of > 2 ranks
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
