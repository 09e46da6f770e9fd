"""Dependency graphs: the edges of a plan for networkx, and the same graph as GraphML and DOT."""

import re
from io import BytesIO
from itertools import pairwise

import networkx
import pytest

import quintsched as qs
from quintsched.formats.graph_text import to_dot, to_graphml
from quintsched.ir.instruction_set import Compute, Recv, Send

PLANS = [
    qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=2),
    qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2),
    qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=True),
    qs.compile("zb-h1", mesh="dp=2,pp=2", microbatches=2, zero=1, tied={'a "name" \\': (0, 1)}),
]
each_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule.name)


@each_plan
def test_a_sound_plan_is_a_dag_of_its_instructions(plan):
    graph = plan.graph()
    assert networkx.is_directed_acyclic_graph(graph)
    nodes = [(data["rank"], data["index"], data["instruction"]) for _, data in graph.nodes(data=True)]
    assert nodes == [(r, k, i) for r, program in enumerate(plan.programs) for k, i in enumerate(program)]
    at = dict(graph.nodes(data=True))
    messages = 0
    for source, target, kind in graph.edges(data="kind"):
        one, other = at[source], at[target]
        if kind == "message":
            messages += 1
            assert isinstance(one["instruction"], Send)
            assert isinstance(other["instruction"], Recv)
            assert one["instruction"].peer == other["rank"]
        else:
            assert kind in ("program", "data")
            assert one["rank"] == other["rank"]
    assert messages == sum(isinstance(i, Send) for _, _, i in nodes)
    order = networkx.transitive_closure_dag(graph)
    for rank in range(plan.mesh.pp):
        computed = [n for n, of in at.items() if of["rank"] == rank and of["instruction"].computes]
        assert all(order.has_edge(a, b) for a, b in pairwise(computed))
    if plan.schedule.name == "interleaved-1f1b":
        numbers = {str(of["instruction"]): n for n, of in at.items() if isinstance(of["instruction"], Compute)}
        for stage, unit in ((stage, unit) for stage in range(4) for unit in range(2)):
            before = numbers[f"Fwd(stage={stage}, microbatch={unit})"]
            assert order.has_edge(before, numbers[f"Bwd(stage=0, microbatch={unit})"])


@each_plan
def test_networkx_reads_the_graph_back(plan):
    found, graph = networkx.read_graphml(BytesIO(to_graphml(plan).encode()), node_type=int), plan.graph()
    assert {*found.edges(data="kind")} == {*graph.edges(data="kind")}
    for node, about in graph.nodes(data=True):
        theirs, instruction = found.nodes[node], about["instruction"]
        assert (theirs["rank"], theirs["index"]) == (about["rank"], about["index"])
        assert (theirs["op"], theirs.get("stage")) == (instruction.op, getattr(instruction, "stage", None))


@each_plan
def test_dot_has_a_cluster_per_rank_and_every_edge(plan):
    text = to_dot(plan)
    edges = re.findall(r"^ (\d+) -> (\d+) \[kind=(\w+)", text, re.MULTILINE)
    assert {(int(one), int(other), kind) for one, other, kind in edges} == {*plan.graph().edges(data="kind")}
    clusters = [*(at.start() for at in re.finditer("subgraph cluster_", text)), text.index(" -> ")]
    nodes = [re.findall(r"^  (\d+) \[label=", text[a:b], re.MULTILINE) for a, b in pairwise(clusters)]
    assert [[*map(int, of)] for of in nodes] == [[*plan.columns.rows_of(rank)] for rank in range(plan.mesh.pp)]
    for line in text.splitlines():
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line
