"""Does a plan run to its end where every call blocks until its partner has come? The `blocking` profile, exactly.

    rank 0   …  SendAct ▶ waits …………… done           a rank walks its program and stops at an event
    rank 1   …  Fwd  ……………  ▶ RecvAct, done           until all of its members have come to it

With no wildcard receive, the order in which ranks are looked at does not matter: one walk decides. It is the event
graph of one queue per rank, which is slower to build; that one says why, where this one stops.
"""

from __future__ import annotations

import numpy as np

from quintsched.graph.plan_events import Events


def all_meet(events: Events) -> bool:
    """Return whether every rank comes to the end of its program; O(instructions)."""
    members = np.bincount(events.of, minlength=events.num_events)
    shared = np.flatnonzero(members[events.of] > 1)
    starts = np.searchsorted(shared, events.columns.first).tolist()
    meeting, missing = events.of[shared].tolist(), members.tolist()
    waiting: dict[int, list[int]] = {}
    position, ends = starts[:-1], starts[1:]
    ready = list(range(len(ends)))
    while ready:
        rank = ready.pop()
        here, end = position[rank], ends[rank]
        while here < end:
            event = meeting[here]
            here += 1
            missing[event] -= 1
            if missing[event]:
                waiting.setdefault(event, []).append(rank)
                break
            ready += waiting.pop(event)
        else:
            here = end + 1
        position[rank] = here
    return all(here > end for here, end in zip(position, ends, strict=True))
