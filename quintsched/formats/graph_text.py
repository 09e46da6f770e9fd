"""Dependency graph of a plan as text, for tools that draw or analyse graphs: GraphML and Graphviz's DOT.

    digraph "1f1b on pp=2, 2 microbatches" {
     subgraph cluster_0 { label="rank 0"; 0 [label="F0", …]; 1 [label="SA0", …]; … }
     0 -> 1 [kind=program]; …

Nodes and edges are those of `to_networkx`, with each field of an instruction as a plain attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import networkx

from quintsched.formats.networkx_graph import to_networkx
from quintsched.ir.instruction_set import Instruction, short
from quintsched.ir.plan_data import PlanData

STYLES = {"program": "color=gray", "data": "color=black", "message": 'color="#0072B2", style=dashed, constraint=false'}
"""Style of each kind of edge in DOT."""


def to_graphml(plan: PlanData) -> str:
    """Return the graph as GraphML, which Gephi, yEd and networkx read."""
    graph: networkx.DiGraph[int] = networkx.DiGraph(name=plan.title)
    full = to_networkx(plan)
    for node, about in full.nodes(data=True):
        graph.add_node(node, rank=about["rank"], index=about["index"], **_plain(about["instruction"]))
    graph.add_edges_from(full.edges(data=True))
    return "\n".join(networkx.generate_graphml(graph)) + "\n"


def to_dot(plan: PlanData) -> str:
    """Return the graph as DOT, with a cluster for each pipeline rank."""
    return "\n".join(_dot(plan)) + "\n"


def _dot(plan: PlanData) -> Iterator[str]:
    graph = to_networkx(plan)
    yield f"digraph {_quoted(plan.title)} {{"
    yield ' rankdir=LR; node [shape=box, fontname="sans-serif"];'
    for rank in range(plan.columns.num_ranks):
        yield f" subgraph cluster_{rank} {{"
        yield f'  label="rank {rank}";'
        for row in plan.columns.rows_of(rank):
            instruction = graph.nodes[row]["instruction"]
            yield f"  {row} [label={_quoted(short(instruction))}, tooltip={_quoted(str(instruction))}];"
        yield " }"
    for source, target, about in graph.edges(data=True):
        yield f" {source} -> {target} [kind={about['kind']}, {STYLES[about['kind']]}];"
    yield "}"


def _plain(instruction: Instruction) -> dict[str, int | str]:
    """Return the op, the abbreviation and the fields of an instruction, as numbers and text."""
    found: dict[str, int | str] = {"op": instruction.op, "label": short(instruction)}
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        found[field.name] = "+".join(map(str, value)) if isinstance(value, tuple) else value
    return found


def _quoted(text: str) -> str:
    backslash = "\\"
    return '"' + text.replace(backslash, backslash * 2).replace('"', backslash + '"') + '"'
