"""Export of a plan's dependency graph to networkx."""

from __future__ import annotations

import networkx

from quintsched.graph.event_edges import Edges, all_data_edges, queue_edges
from quintsched.graph.events_and_channels import Events
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.plan_data import PlanData
from quintsched.verify.soundness import require_wellformed


def to_networkx(plan: PlanData) -> networkx.DiGraph[int]:
    """Return the dependency graph: one node per instruction, numbered rank by rank in program order.

    Nodes carry `rank` (pp coordinate), `index` (in its program) and `instruction`. An edge means "must end before the
    other can begin", with `kind`: "program" (same queue on a rank), "data" (a value is passed) or "message" (a send to
    its receive). Queues are those of the `channel` profile. A sound plan gives a DAG; a plan with an index out of range
    raises `UnsoundError`.
    """
    require_wellformed(plan)
    alone = Events.apart(plan)
    columns, queues = alone.columns, PROFILES["channel"].queues(alone)
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    for row, instruction in enumerate(columns.instructions(range(len(columns)))):
        rank, index = columns.place(row)
        graph.add_node(row, rank=rank, index=index, instruction=instruction)
    graph.add_edges_from(_pairs(all_data_edges(alone, plan.flows)), kind="data")
    graph.add_edges_from(_pairs(queue_edges(alone, queues)), kind="program")
    graph.add_edges_from(zip(*(rows.tolist() for rows in alone.channels.pairs), strict=True), kind="message")
    return graph


def _pairs(edges: Edges) -> list[tuple[int, int]]:
    sources, targets, _ = edges
    return list(zip(sources.tolist(), targets.tolist(), strict=True))
