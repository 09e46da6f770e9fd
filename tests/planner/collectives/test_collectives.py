"""Collectives as plans: proved for any number of ranks, broken ones refused in words, bytes and steps as in theory."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.collectives import NATIVE, CollectivePlan, Communication, Wire, spell
from quintsched.collectives.collective_json import dumps, loads
from quintsched.collectives.collective_program import CollectiveStep, RecvChunk, SendChunk, SendRecv
from quintsched.collectives.collective_timing import (
    TREE_CHOICES,
    crossover_bytes,
    fastest_tree_seconds,
    least_bytes,
    native_seconds,
    spelled_seconds,
)
from quintsched.collectives.double_tree_algorithm import double_tree
from quintsched.collectives.expand_collective import num_steps
from quintsched.collectives.gradient_exchange import choose, spelled_out
from quintsched.ir.diagnostics import Point
from quintsched.text.collective_grid import time_grid

HALVES = ("reduce_scatter", "all_gather")
FREE = Wire(latency_s=0.0, bandwidth=1.0)
STEPS = Wire(latency_s=1.0, bandwidth=1.0)
SIZES = range(2, 65)


def steps(plan: CollectivePlan) -> int:
    """Return the number of messages in sequence, by the simulator."""
    return round(plan.simulate(0, STEPS).makespan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(2, 65, 16))
def test_all_reduces_are_sound_for_any_number_of_ranks(first: int) -> None:
    for size in range(first, min(first + 16, 65)):
        ring, tree = spell("all_reduce", "ring", size), spell("all_reduce", "tree", size)
        for plan in (ring, tree):
            assert plan.check().sound, plan.check().explain()
        assert len(ring.messages) == 2 * (size - 1) * size
        assert len(tree.messages) == 2 * (size - 1) * tree.chunks


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 13, 16, 33, 64])
@pytest.mark.parametrize("kind", HALVES)
def test_halves_are_sound(kind: str, size: int) -> None:
    plan = spell(kind, "ring", size)
    assert plan.check().sound, plan.check().explain()
    assert steps(plan) == size - 1


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2, 20), rounds=st.integers(1, 3), pairs=st.integers(1, 12))
def test_any_number_of_chunks_is_sound_and_takes_as_many_steps_as_said(size: int, rounds: int, pairs: int) -> None:
    for algorithm, chunks in (("ring", rounds * size), ("tree", 2 * pairs)):
        plan = spell("all_reduce", algorithm, size, chunks)
        assert plan.check().sound
        assert steps(plan) == num_steps(plan.kind, plan.algorithm, size, chunks)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 31, 64])
def test_a_ring_sends_what_theory_says(size: int) -> None:
    data = 1000.0 * size
    run = spell("all_reduce", "ring", size).simulate(data, FREE)
    assert run.sent_bytes == pytest.approx([2 * (size - 1) / size * data] * size)
    assert steps(run.plan) == 2 * (size - 1)
    for kind in HALVES:
        half = spell(kind, "ring", size).simulate(data, FREE)
        assert half.sent_bytes == pytest.approx([(size - 1) / size * data] * size)
        assert steps(half.plan) == size - 1


@pytest.mark.parametrize("size", [2, 3, 8, 21, 64])
def test_a_ring_uses_the_bandwidth(size: int) -> None:
    wire = Wire(latency_s=20e-6, bandwidth=1e9)
    run = spell("all_reduce", "ring", size).simulate(1e9, wire)
    bound = 2 * (size - 1) / size * 1e9 / wire.bandwidth
    assert bound <= run.makespan <= 1.05 * bound
    assert run.bandwidth_use == pytest.approx(bound / run.makespan)


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_is_an_inner_node_of_both_trees(size: int) -> None:
    trees = double_tree(size)
    inner = [{parent for parent in tree.parents if parent is not None} for tree in trees]
    assert not inner[0] & inner[1]
    for tree in trees:
        assert sorted(tree.leaves_first()) == [r for r in range(size) if tree.parents[r] is not None]
        assert max(len(tree.children(rank)) for rank in range(size)) <= 2
    for chunks in TREE_CHOICES:
        assert num_steps("all_reduce", "tree", size, chunks) <= 2 * chunks + 4 * size.bit_length()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9, 12, 16, 18, 33, 64])
def test_auto_changes_over_where_the_simulator_does(size: int) -> None:
    wire = Wire(latency_s=30e-6, bandwidth=2e9)
    ring = spell("all_reduce", "ring", size)
    trees = [spell("all_reduce", "tree", size, chunks) for chunks in TREE_CHOICES]
    communication = spelled_out("auto", [("all_reduce", size)], wire)

    def ring_wins(num_bytes: float) -> bool:
        return ring.simulate(num_bytes, wire).makespan < min(t.simulate(num_bytes, wire).makespan for t in trees)

    crossover = crossover_bytes(size, wire)
    if crossover == float("inf"):
        assert size == 2
        return
    assert ring_wins(1.1 * crossover + 8)
    assert not ring_wins(0.9 * crossover - 8 if crossover > 16 else 0)
    for num_bytes, algorithm in ((1.01 * crossover + 1, "ring"), (0.99 * crossover - 1, "tree")):
        if num_bytes >= 0 and (size > 4 or algorithm == "ring"):
            chosen = choose(communication, "all_reduce", size, num_bytes)
            assert chosen is not None
            assert chosen.algorithm == algorithm


def test_closed_forms_are_what_the_simulator_finds_and_native_bounds_them() -> None:
    wire = Wire(latency_s=1e-5, bandwidth=1e9)
    for size in (2, 3, 6, 8, 17, 32):
        for num_bytes in (0.0, 1e3, 1e6, 1e9):
            native = native_seconds("all_reduce", size, num_bytes, wire)
            for algorithm, chunks in (("ring", size), ("tree", 2), ("tree", 8)):
                plan = spell("all_reduce", algorithm, size, chunks)
                said = spelled_seconds("all_reduce", plan.algorithm, size, chunks, num_bytes, wire)
                assert plan.simulate(num_bytes, wire).makespan == pytest.approx(said)
                assert native <= said * (1 + 1e-9)
    assert fastest_tree_seconds(64, 8, wire) < 0.25 * spelled_seconds("all_reduce", "ring", 64, 64, 8, wire)
    assert least_bytes("all_gather", 4, 100) == 75


TWO_LEVELS = [(2, 2, 1), (2, 3, 2), (3, 2, 1), (4, 4, 1), (2, 8, 1)]
"""Nodes, ranks on each, and chunks of a part."""


@pytest.mark.parametrize(("nodes", "local", "rounds"), TWO_LEVELS)
@pytest.mark.parametrize("kind", ["all_reduce", *HALVES])
def test_two_levels_are_sound_and_take_as_long_as_said(kind: str, nodes: int, local: int, rounds: int) -> None:
    size = nodes * local
    wire = Wire(latency_s=1e-5, bandwidth=1e9, nodes=nodes, node_latency_s=2e-6, node_bandwidth=2e10)
    plan = spell(kind, "two-level", size, rounds * size, nodes)
    assert plan.check().sound, plan.check().explain()
    assert loads(dumps(plan)) == plan
    for num_bytes in (0.0, 1e4, 1e8):
        for one in (plan, spell(kind, "ring", size)):
            said = spelled_seconds(plan.kind, one.algorithm, size, one.chunks, num_bytes, wire)
            run = one.simulate(num_bytes, wire)
            assert run.makespan == pytest.approx(said)
            assert native_seconds(plan.kind, size, num_bytes, wire) <= said * (1 + 1e-9)
    assert run.sent_bytes == plan.simulate(1e8, wire).sent_bytes, "as many bytes as in one ring"
    between = sum(sent.rank // local != received.rank // local for sent, received in plan.messages)
    assert between * size == len(plan.messages) * (nodes - 1) * size // (size - 1), "fewer of them between nodes"


def test_two_levels_change_over_from_a_tree_where_the_simulator_does() -> None:
    wire = Wire(latency_s=1e-5, bandwidth=1e9, nodes=2, node_latency_s=8e-6, node_bandwidth=2e10)
    plan = spell("all_reduce", "two-level", 16, nodes=2)
    crossover = crossover_bytes(16, wire, "two-level")
    assert 1e3 < crossover < 0.5 * crossover_bytes(16, wire), "earlier than one ring over slow links"
    communication = spelled_out("auto", [("all_reduce", 16)], wire)
    for num_bytes, algorithm in ((1.01 * crossover + 1, "two-level"), (0.99 * crossover - 1, "tree")):
        chosen = choose(communication, "all_reduce", 16, num_bytes)
        assert chosen is not None
        assert chosen.algorithm == algorithm
        rings = plan.simulate(num_bytes, wire).makespan
        assert (rings < fastest_tree_seconds(16, num_bytes, wire)) == (algorithm == "two-level")


@pytest.mark.parametrize(("size", "nodes"), [(4, 1), (4, 4), (6, 4), (4, 0)])
def test_two_levels_need_nodes_of_equally_many_ranks(size: int, nodes: int) -> None:
    with pytest.raises(qs.UsageError, match="equally many ranks"):
        spell("all_reduce", "two-level", size, nodes=nodes)


def with_step(plan: CollectivePlan, rank: int, index: int, *steps: CollectiveStep) -> CollectivePlan:
    """Return the plan with other steps in the place of one."""
    program = plan.programs[rank]
    changed = (*program[:index], *steps, *program[index + 1 :])
    return replace(plan, programs=(*plan.programs[:rank], changed, *plan.programs[rank + 1 :]))


def halved(plan: CollectivePlan) -> CollectivePlan:
    """Return a plan in which everybody sends, then receives."""

    def apart(step: CollectiveStep) -> tuple[CollectiveStep, ...]:
        assert isinstance(step, SendRecv)
        return SendChunk(step.to, step.send_chunk), RecvChunk(step.source, step.recv_chunk, step.reduce)

    return replace(plan, programs=tuple(tuple(s for step in p for s in apart(step)) for p in plan.programs))


RING = spell("all_reduce", "ring", 4)
FIRST = RING.programs[0][0]
assert isinstance(FIRST, SendRecv)
BROKEN = {
    "a receive that nobody sends": (
        with_step(RING, 0, 5),
        Point.CHANNELS,
        "rank 0 never receives what it sends",
    ),
    "another chunk than expected": (
        with_step(RING, 0, 0, replace(FIRST, send_chunk=0)),
        Point.CHANNELS,
        "sends chunk 0, but rank 1 step 0",
    ),
    "a circle": (halved(RING), Point.DEADLOCK, "4 waits close a circle"),
    "a sum that is stored": (
        with_step(RING, 0, 0, replace(FIRST, reduce=False)),
        Point.COMPLETE,
        "lacks what rank 0 brings",
    ),
    "a sum that is added again": (
        replace(RING, programs=tuple(tuple(replace(s, reduce=True) for s in p) for p in RING.programs)),
        Point.COMPLETE,
        "a second time",
    ),
    "nothing to send yet": (
        replace(spell("reduce_scatter", "ring", 3), kind="all_gather"),
        Point.COMPLETE,
        "of which it has nothing yet",
    ),
    "a rank that is not there": (
        with_step(RING, 0, 0, replace(FIRST, to=4)),
        Point.WELL_FORMED,
        "rank 4 is not another one of the 4 ranks",
    ),
    "a chunk that is not there": (with_step(RING, 0, 0, replace(FIRST, send_chunk=9)), Point.WELL_FORMED, "chunk 9"),
    "a chunk that is lost": (
        with_step(RING, 0, 3, replace(FIRST, recv_chunk=FIRST.send_chunk, reduce=False)),
        Point.WELL_FORMED,
        "overwrites the chunk that it sends",
    ),
    "half of the work": (replace(RING, kind="all_reduce", programs=RING.programs[:3]), Point.WELL_FORMED, "3 programs"),
    "a reduce-scatter alone": (
        replace(spell("reduce_scatter", "ring", 4), kind="all_reduce"),
        Point.COMPLETE,
        "rank 0 ends with a chunk 1 that lacks",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_are_refused_in_words(name: str) -> None:
    plan, point, words = BROKEN[name]
    verdict = plan.check()
    assert not verdict.sound
    assert {finding.point for finding in verdict.findings} == {point}
    assert words in verdict.explain()
    with pytest.raises(qs.UnsoundError):
        plan.simulate(1.0, FREE)


def test_a_pair_may_exchange_and_add_the_same_chunk() -> None:
    both = tuple((SendRecv(1 - rank, 0, 1 - rank, 0, True),) for rank in range(2))
    assert CollectivePlan("all_reduce", "ring", 2, 1, both).check().sound


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_reduce", "ring", 1), "ring over an axis of size 1"),
        (("all_reduce", "tree", 1), "tree over an axis of size 1"),
        (("all_reduce", "ring", 1000), "from 2 to 256 ranks"),
        (("all_gather", "tree", 4), "a tree cannot do all_gather over 4 ranks"),
        (("all_reduce", "ring", 4, 6), "multiple of the number of ranks"),
        (("all_reduce", "tree", 4, 3), "multiple of 2"),
        (("all_reduce", "rng", 4), "did you mean 'ring'"),
        (("allreduce", "ring", 4), "did you mean 'all_reduce'"),
    ],
)
def test_what_cannot_be_spelled_out(arguments: tuple[str, str, int], words: str) -> None:
    with pytest.raises(qs.UsageError, match=words):
        spell(*arguments)


@pytest.mark.parametrize("plan", [RING, spell("all_reduce", "tree", 5), spell("all_gather", "ring", 3, 6)])
def test_files_come_back_as_they_were(plan: CollectivePlan, tmp_path) -> None:
    assert loads(dumps(plan)) == plan
    plan.save(tmp_path / "plan.json")
    assert CollectivePlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "quintsched.plan"}, "/format"),
        ({"version": 2}, "/version"),
        ({"size": 1}, "/size"),
        ({"size": "4"}, "/size"),
        ({"colour": 1}, "/colour: unknown key"),
        ({"programs": [[{"op": "SendAll"}]]}, "/programs/0/0: not a step"),
        ({"programs": [[{"op": "SendChunk", "to": 1}]]}, "/programs/0/0: SendChunk lacks 'chunk'"),
        ({"programs": [[{"op": "SendChunk", "to": 1, "chunk": 0, "x": 1}]]}, "/programs/0/0: SendChunk has no 'x'"),
        ({"programs": [[{"op": "SendChunk", "to": True, "chunk": 0}]]}, "/programs/0/0/to: true is not a whole number"),
        ({"programs": [[{"op": "RecvChunk", "source": 1, "chunk": 0, "reduce": 1}]]}, "true or false"),
    ],
)
def test_broken_files_say_where(change: dict[str, object], words: str) -> None:
    with pytest.raises(qs.InputError, match=words.replace("/", "\\/")):
        loads(json.dumps(json.loads(dumps(RING)) | change))


def test_a_plan_holds_what_its_buckets_call() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2,ep=3", microbatches=4, communication="ring")
    assert {(p.kind, p.size) for p in plan.communication.plans.values()} == {("all_reduce", 2), ("all_reduce", 6)}
    assert qs.Plan.from_json(plan.to_json()) == plan
    assert plan.check().sound
    assert "ring" in plan.title
    assert "collectives" not in qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4).to_json()


def test_auto_keeps_its_wire_in_the_plan_and_needs_no_replicas() -> None:
    wire = Wire(latency_s=1e-4, bandwidth=1e8)
    plan = qs.compile("1f1b", mesh="dp=8,pp=2", microbatches=2, communication="auto", wire=wire)
    again = qs.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.communication.wire == wire
    small, large = (choose(again.communication, "all_reduce", 8, size) for size in (100.0, 1e9))
    assert small is not None
    assert large is not None
    assert (small.algorithm, large.algorithm) == ("tree", "ring")
    assert choose(again.communication, "all_gather", 8, 100.0) is None
    assert qs.compile("1f1b", mesh="pp=2", microbatches=2, communication="auto").communication is NATIVE


@pytest.mark.parametrize(
    ("mesh", "communication", "words"),
    [
        ("pp=2", "ring", "ring over an axis of size 1: on mesh pp=2"),
        ("tp=2", "tree", "tree over an axis of size 1: on mesh tp=2"),
        ("dp=2,pp=2", "rings", "did you mean 'ring'"),
    ],
)
def test_what_a_plan_cannot_spell_out(mesh: str, communication: str, words: str) -> None:
    with pytest.raises(qs.UsageError, match=words):
        qs.compile("1f1b", mesh=mesh, microbatches=4, communication=communication)


def edited(plan: qs.Plan, **change: object) -> str:
    return json.dumps({**json.loads(plan.to_json()), **change})


def test_plan_files_whose_collectives_do_not_fit() -> None:
    plan = qs.compile("1f1b", mesh="dp=4", microbatches=1, communication="ring")
    entry = {"kind": "all_reduce", "algorithm": "ring", "size": 4, "chunks": 4}
    for change, words in (
        ({"collectives": {}}, "no collective spells out all_reduce over 4 ranks"),
        ({"communication": "native"}, "communication is native"),
        ({"communication": "tree"}, "is a ring, but communication is tree"),
        ({"communication": "auto"}, "/wire"),
        ({"collectives": {"a": entry, "b": {**entry, "size": 2, "chunks": 2}}}, "which no instruction calls"),
        ({"collectives": {"a": {**entry, "chunks": 5}}}, "/collectives/a: ring over 4 ranks in 5 chunks"),
        ({"collectives": {"a": {**entry, "programs": [[{"op": "?"}]]}}}, "/collectives/a/programs/0/0: not a step"),
    ):
        with pytest.raises(qs.InputError, match=words):
            qs.Plan.from_json(edited(plan, **change))


def test_a_plan_is_as_sound_as_its_collectives() -> None:
    plan = qs.compile("1f1b", mesh="dp=4", microbatches=1, communication="ring")
    broken = replace(plan, communication=Communication("ring", {"mine": halved(RING)}))
    assert qs.Plan.from_json(broken.to_json()) == broken
    verdict = broken.check()
    assert not verdict.sound
    assert "collective 'mine': rank 0: rank 0 step 0, SendChunk" in verdict.explain()


def test_the_grid_shows_what_arrives() -> None:
    assert time_grid(spell("all_reduce", "ring", 3)) == [
        "rank 0  1+ 0+ 2  1",
        "rank 1  2+ 1+ 0  2",
        "rank 2  0+ 2+ 1  0",
    ]
    assert len(time_grid(spell("all_reduce", "tree", 5), width=20)) > 6
