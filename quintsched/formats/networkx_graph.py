"""A plan's dependency graph for networkx."""

from __future__ import annotations

import networkx
import numpy as np

from quintsched.graph.plan_events import PROFILES, EventGraph, Events, data_edges, queue_edges
from quintsched.plan import Plan


def to_networkx(plan: Plan) -> networkx.DiGraph[int]:
    """Return the dependency graph: one node per instruction, numbered rank by rank in program order.

    Nodes carry `rank` (pp coordinate), `index` (in its program) and `instruction`. An edge says "must end before
    the other can begin", with `kind`: "program" (same queue on a rank), "data" (a value is handed on) or "message"
    (a send to its receive). Queues are those of the `channel` profile. A plan that is sound gives a DAG.
    """
    columns = plan.columns
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    for row in range(len(columns)):
        rank, index = columns.place(row)
        graph.add_node(row, rank=rank, index=index, instruction=plan.programs[rank][index])
    merged = Events.merge(plan)
    alone = Events(columns, merged.channels, merged.groups, np.arange(len(columns)))
    graph.add_edges_from(_pairs(EventGraph(alone.num_events, *data_edges(alone, plan.flows))), kind="data")
    graph.add_edges_from(_pairs(EventGraph(alone.num_events, *queue_edges(alone, PROFILES["channel"]))), kind="program")
    graph.add_edges_from(zip(*(rows.tolist() for rows in alone.channels.pairs), strict=True), kind="message")
    return graph


def _pairs(graph: EventGraph) -> list[tuple[int, int]]:
    return list(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))
