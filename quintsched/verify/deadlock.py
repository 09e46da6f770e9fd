"""Point 4, freedom of deadlock: the event graph has no cycle under each transport profile; else the cycle is described.

rank 1: 2 RecvAct(…) must end before 4 SendGrad(…) can begin     ┐ these two wait for each other
rank 0: 3 RecvGrad(…) must end before 4 SendAct(…) can begin     ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from quintsched.graph.blocking_transport import meeting_order
from quintsched.graph.event_edges import build_graph
from quintsched.graph.event_graph import stretches
from quintsched.graph.events_and_channels import NO_GROUP, Events
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.diagnostics import Finding, Point
from quintsched.ir.plan_data import PlanData


def deadlocks(
    plan: PlanData, events: Events, flow_is_broken: bool
) -> tuple[dict[str, bool], dict[str, tuple[Finding, ...]]]:
    """Decide freedom of deadlock for every profile, strictest first: the first that is free implies the later ones.

    With a broken data flow this implication fails: later profiles wait for values that come too late, `blocking` does
    not. The graph includes the rank's host, which issues the program in order.
    """
    free: dict[str, bool] = {}
    found: dict[str, tuple[Finding, ...]] = {}
    if meeting_order(plan) is not None:
        free["blocking"] = True
        if not flow_is_broken:
            return dict.fromkeys(PROFILES, True), found
    for name in (name for name in PROFILES if name not in free):
        graph = build_graph(events, plan.flows, PROFILES[name], one_host=True)
        run = graph.run_events()
        free[name] = run.finished
        if run.finished and not flow_is_broken:
            return dict.fromkeys(PROFILES, True) | free, found
        if not run.finished:
            found[name] = tuple(_describe_cycle(plan, events, graph.cycle(run.waiting), name))
    return free, found


def _describe_cycle(plan: PlanData, events: Events, cycle: Sequence[tuple[int, int]], name: str) -> list[Finding]:
    """Return the findings of a cycle: per rank of it, the instruction that has to end before another can begin."""
    lines = []
    for event, following, rank in stretches(cycle):
        here, there = events.member(event, rank), events.member(following, rank)
        words = plan.columns.place_in_words
        message = f"rank {rank}: {words(here)} must end before {words(there)} can begin"
        lines.append(Finding(Point.DEADLOCK, message, rank, plan.columns.place(here)[1]))
    meets = any(events.groups[events.first_rows[event]] != NO_GROUP for event, _ in cycle)
    head = Finding(
        Point.DEADLOCK,
        f"under the transport profile {name!r} {len(lines)} waits close a circle; a message ends only when "
        f"both its ends have begun{', a collective when all its ranks have' if meets else ''}:",
    )
    return [head, *lines]
