"""A plan's dependency graph for networkx."""

from __future__ import annotations

import networkx

from quintsched.dataflow import Flow, flows_of
from quintsched.events import PROFILES, build_graph, merge_events
from quintsched.instructions import Send
from quintsched.plan import Plan


def to_networkx(plan: Plan) -> networkx.DiGraph[int]:
    """Return the dependency graph: one node per instruction, numbered rank by rank in program order.

    Nodes carry `rank` (pp coordinate), `index` (in its program) and `instruction`. An edge says "must end before
    the other can begin", with `kind`: "program" (same queue on a rank), "data" (a value is handed on) or "message"
    (a send to its receive). Queues are those of the `channel` profile. A plan that is sound gives a DAG.
    """
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    number: dict[tuple[int, int], int] = {}
    for rank, program in enumerate(plan.programs):
        for index, instruction in enumerate(program):
            number[rank, index] = len(number)
            graph.add_node(number[rank, index], rank=rank, index=index, instruction=instruction)
    events = merge_events(plan)
    flows = flows_of(plan.programs, plan.layout)
    no_flows = [[Flow()] * len(program) for program in plan.programs]
    for kind, flows_of_kind in (("data", flows), ("program", no_flows)):  # where both hold, it is "program"
        edges = build_graph(plan, flows_of_kind, PROFILES["channel"], events)
        for source, target, rank in zip(edges.sources, edges.targets, edges.ranks, strict=True):
            ends = [number[p.rank, p.index] for p in events.members[target] if p.rank == rank]
            begins = [number[p.rank, p.index] for p in events.members[source] if p.rank == rank]
            graph.add_edges_from(((begin, end) for begin in begins for end in ends), kind=kind)
    for send, *receive in events.members:
        for place in receive:
            if isinstance(plan.programs[send.rank][send.index], Send):
                graph.add_edge(number[send.rank, send.index], number[place.rank, place.index], kind="message")
    return graph
