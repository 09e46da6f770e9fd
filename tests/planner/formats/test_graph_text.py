"""Graphs as text: what other tools read is the graph of the plan."""

import re
from io import BytesIO
from itertools import pairwise

import networkx
import pytest

import quintsched as qs
from quintsched.formats.graph_text import to_dot, to_graphml

PLANS = [
    qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2),
    qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=True),
    qs.compile("zb-h1", mesh="dp=2,pp=2", microbatches=2, zero=1, tied={'a "name" \\': (0, 1)}),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule.name)
def test_networkx_reads_the_graph_back(plan):
    found, graph = networkx.read_graphml(BytesIO(to_graphml(plan).encode()), node_type=int), plan.graph()
    assert {*found.edges(data="kind")} == {*graph.edges(data="kind")}
    for node, about in graph.nodes(data=True):
        theirs, instruction = found.nodes[node], about["instruction"]
        assert (theirs["rank"], theirs["index"]) == (about["rank"], about["index"])
        assert (theirs["op"], theirs.get("stage")) == (instruction.op, getattr(instruction, "stage", None))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule.name)
def test_dot_has_a_cluster_per_rank_and_every_edge(plan):
    text = to_dot(plan)
    edges = re.findall(r"^ (\d+) -> (\d+) \[kind=(\w+)", text, re.MULTILINE)
    assert {(int(one), int(other), kind) for one, other, kind in edges} == {*plan.graph().edges(data="kind")}
    clusters = [*(at.start() for at in re.finditer("subgraph cluster_", text)), text.index(" -> ")]
    nodes = [re.findall(r"^  (\d+) \[label=", text[a:b], re.MULTILINE) for a, b in pairwise(clusters)]
    assert [[*map(int, of)] for of in nodes] == [[*plan.columns.rows_of(rank)] for rank in range(plan.mesh.pp)]
    for line in text.splitlines():
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line
