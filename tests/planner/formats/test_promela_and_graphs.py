"""Plans for other tools: SPIN judges plans and mutants as the checker does; graphs for networkx, GraphML and DOT."""

import re
import shutil
import subprocess
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from random import Random

import networkx
import pytest

import quintsched as qs
from quintsched.formats.graph_text import to_dot, to_graphml
from quintsched.formats.promela import to_promela
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.dataflow_analysis import flow
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import Compute, Overlap, Recv, Send, SendAct
from tests.helpers.refusals import require_refusals
from tests.planner.verify.mutants import mutant, reordered, with_program
from tests.planner.verify.small_plans import LENDING, OFFLOADED, OVERLAPPING, SMALL, held_back, plans_up_to

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
needs_spin = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: spin, gcc)")
SEEDS = (*SMALL, *OFFLOADED, *LENDING, *OVERLAPPING)
MOST, TINY = 60, 32
"""Instructions of a plan that SPIN judges, and of one that it judges often."""


def errors(model: str, folder: Path) -> int:
    """Return how many errors SPIN finds in all interleavings of a model: 0, or 1, where it stops."""
    (folder / "plan.pml").write_text(model)
    _run(folder, "spin", "-a", "plan.pml")
    _run(folder, "gcc", "-O0", "-w", "-DSAFETY", "-DVECTORSZ=8192", "-o", "pan", "pan.c")
    report = _run(folder, "./pan", "-w18", "-m200000", "-n")
    assert "Search not completed" not in report or "errors: 1" in report, report
    return int(report.split("errors: ")[1].split()[0])


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not any(bad in said for bad in ("syntax error", "max search depth too small", "out of memory")), said
    return said


def assert_spin_agrees(plan: qs.Plan, profile: str, folder: Path) -> bool:
    """Under `blocking` SPIN judges all points; under the others whether the queues come to their end."""
    verdict = plan.check(profile=profile)
    wrong = not (verdict.sound if profile == "blocking" else verdict.profiles.get(profile, False))
    agrees = bool(errors(to_promela(plan, profile=profile), folder)) == wrong
    assert agrees, (plan.title, profile, plan.check().explain())
    return wrong


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_spin_and_checker_agree_on_mutants(seed, tmp_path):
    """40 each under blocking rendezvous, on all points of soundness: 400 adjudicated by SPIN."""
    random, plans = Random(seed), plans_up_to(MOST, SEEDS)
    assert any(assert_spin_agrees(mutant(random.choice(plans), random), "blocking", tmp_path) for _ in range(40))


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_spin_and_checker_agree_under_every_profile(profile, tmp_path):
    """30 mutants each but under blocking, of those whose channels and collectives the checker could pair: 120 more;
    5 orders of collectives across groups, and a plan in which a host closes a circle."""
    random, seen, plans = Random(PROFILES[profile].stands_for), [], plans_up_to(TINY, SEEDS)
    while len(seen) < 30 and profile != "blocking":
        plan = mutant(random.choice(plans), random)
        if plan.check().profiles:
            seen.append(assert_spin_agrees(plan, profile, tmp_path))
    assert profile == "blocking" or not all(seen)
    plan = qs.compile("gpipe", mesh="pp=3", microbatches=1, tied={"a": (0, 1), "b": (1, 2), "c": (0, 2)})
    random = Random(4)
    judged = [assert_spin_agrees(reordered(plan, random), profile, tmp_path) for _ in range(5)]
    assert (any(judged), all(judged)) == (profile != "tagged", False)
    assert assert_spin_agrees(held_back(), profile, tmp_path) == (profile != "tagged")


@needs_spin
@pytest.mark.processes
def test_spin_finds_crossing_sends_and_a_forward_beside_the_wrong_backward(tmp_path):
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=2)
    program = list(plan.programs[0])
    first, second = (index for index, i in enumerate(program) if isinstance(i, SendAct))
    program[first], program[second] = program[second], program[first]
    crossed = with_program(plan, 0, program)
    assert Point.CHANNELS in {finding.point for finding in crossed.check().findings}
    assert errors(to_promela(crossed, buffer=4), tmp_path)
    assert assert_spin_agrees(crossed, "channel", tmp_path)
    plan = qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=True)
    assert not assert_spin_agrees(plan, "blocking", tmp_path)
    index, pair = next((k, i) for k, i in enumerate(plan.programs[0]) if isinstance(i, Overlap))
    program = list(plan.programs[0])
    program[index] = Overlap(pair.forward, (pair.backward[0], pair.backward[1] + 1))
    assert assert_spin_agrees(with_program(plan, 0, program), "blocking", tmp_path)


def comments_of(text: str, rank: int) -> list[list[str]]:
    """Return the comments in the model of a rank: the index and the text of each of its instructions."""
    body = text.split(f"active proctype rank_{rank}() {{")[1].split("\n}")[0]
    return [line.split("/* ")[1].split(" */")[0].split(maxsplit=1) for line in body.splitlines() if "/*" in line]


def test_the_model_of_a_pair_takes_and_makes_what_both_sides_do():
    plan = qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=True)
    text, pairs = to_promela(plan), 0
    for rank, program in enumerate(plan.programs):
        assert comments_of(text, rank) == [[str(index), str(i)] for index, i in enumerate(program)]
        for index, pair in enumerate(program):
            if isinstance(pair, Overlap):
                line = next(line for line in text.splitlines() if f" {index} {pair} */" in line)
                sides = [flow(side, plan.layout, rank) for side in pair.sides]
                assert line.count("take(") == sum(len(side.consumes) for side in sides)
                assert line.count("make(") == sum(len(side.produces) for side in sides)
                pairs += 1
    assert pairs == len(plan.columns.rows_where(Overlap)) > 0


def test_a_title_stays_in_its_comment_and_what_cannot_be_modelled_is_refused():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=1)
    evil = replace(plan, schedule=type(plan.schedule)("*/\n#include <x>\n/*", 1))
    assert to_promela(evil).splitlines()[0] == "/* * / #include <x> /* on pp=2, 1 microbatch"
    wide = qs.compile("gpipe", mesh="pp=90", microbatches=1)
    require_refusals(
        ("cannot hold -1 messages", lambda: to_promela(plan, buffer=-1)),
        ("did you mean 'channel'", lambda: to_promela(plan, profile="chanel")),
        ("SPIN runs 255 at most", lambda: to_promela(wide, profile="channel")),
    )
    with pytest.raises(qs.UnsoundError, match="there are 1 programs"):
        to_promela(replace(plan, programs=plan.programs[:1]))


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
