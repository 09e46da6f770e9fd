"""The dependency graph for networkx."""

from itertools import pairwise

import networkx
import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Compute, Recv, Send


@pytest.mark.parametrize(
    ("name", "mesh", "m"), [("gpipe", "pp=1", 1), ("1f1b", "dp=2,pp=3", 4), ("interleaved-1f1b", "pp=2", 2)]
)
def test_a_sound_plan_is_a_dag_of_its_instructions(name, mesh, m):
    plan = qs.compile(name, mesh=mesh, microbatches=m)
    graph = plan.graph()
    assert networkx.is_directed_acyclic_graph(graph)
    nodes = [(data["rank"], data["index"], data["instruction"]) for _, data in graph.nodes(data=True)]
    assert nodes == [(r, k, i) for r, program in enumerate(plan.programs) for k, i in enumerate(program)]
    assert_edges(plan, graph)


def assert_edges(plan: qs.Plan, graph: "networkx.DiGraph[int]") -> None:
    instruction = networkx.get_node_attributes(graph, "instruction")
    rank = networkx.get_node_attributes(graph, "rank")
    messages = 0
    for source, target, kind in graph.edges(data="kind"):
        assert kind in ("program", "data", "message")
        if kind == "message":
            messages += 1
            assert isinstance(instruction[source], Send)
            assert isinstance(instruction[target], Recv)
            assert instruction[source].peer == rank[target]
        else:
            assert rank[source] == rank[target]
    assert messages == sum(isinstance(i, Send) for i in instruction.values())
    order = networkx.transitive_closure_dag(graph)
    for program in range(plan.mesh.pp):
        computed = [n for n, i in instruction.items() if rank[n] == program and isinstance(i, Compute)]
        assert all(order.has_edge(a, b) for a, b in pairwise(computed))


def test_a_backward_comes_after_its_forwards_on_every_stage():
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2)
    graph = plan.graph()
    nodes = {str(i): n for n, i in networkx.get_node_attributes(graph, "instruction").items()}
    for microbatch in range(2):
        ancestors = networkx.ancestors(graph, nodes[f"Bwd(stage=0, microbatch={microbatch})"])
        for stage in range(4):
            assert nodes[f"Fwd(stage={stage}, microbatch={microbatch})"] in ancestors
