"""Collectives as plans: proved for any number of ranks, and as runs with garbage in the buffers and theory have it."""

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.collectives import CollectivePlan, Communication, Wire, spell
from quintsched.collectives.collective_json import dumps, loads
from quintsched.collectives.collective_program import RecvChunk, SendChunk, SendRecv
from quintsched.collectives.collective_timing import (
    TREE_CHOICES,
    crossover_bytes,
    fastest_tree_seconds,
    native_seconds,
    spelled_seconds,
)
from quintsched.collectives.expand_collective import num_steps
from quintsched.collectives.gradient_exchange import choose, spelled_out
from quintsched.ir.diagnostics import Point
from quintsched.verify.equivalence import equivalence
from quintsched.verify.symbolic_collective import broken_promise
from tests.planner.collectives.mini_mutants import (
    MiniJudge,
    doubling,
    halves,
    mini_mutant,
    small_collectives,
    with_step,
)

HALVES = ("reduce_scatter", "all_gather")
FREE = Wire(latency_s=0.0, bandwidth=1.0)
STEPS = Wire(latency_s=1.0, bandwidth=1.0)
SLOW = Wire(latency_s=1e-5, bandwidth=1e9)
SIMULATED = (2, 3, 5, 8, 21, 33, 64)


def steps(plan: CollectivePlan) -> int:
    """Return the number of messages in sequence, by the simulator."""
    return round(plan.simulate(0, STEPS).makespan)


@pytest.mark.parametrize("first", [2, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, 65, 8))])
def test_collectives_are_sound_and_send_what_theory_says_for_any_number_of_ranks(first: int) -> None:
    for size in range(first, min(first + 8, 65)):
        ring, tree = spell("all_reduce", "ring", size), spell("all_reduce", "tree", size)
        assert len(tree.messages) == 2 * (size - 1) * tree.chunks
        for plan, rounds in ((ring, 2), *((spell(kind, "ring", size), 1) for kind in HALVES), (tree, 0)):
            assert plan.check().sound, plan.check().explain()
            if rounds and size in SIMULATED:
                sent = plan.simulate(1000.0 * size, FREE).sent_bytes
                assert sent == pytest.approx([rounds * (size - 1) * 1000.0] * size)
                assert (len(plan.messages), steps(plan)) == (rounds * (size - 1) * size, rounds * (size - 1))
        if size not in SIMULATED:
            continue
        run, bound = ring.simulate(1e9, Wire(latency_s=20e-6, bandwidth=1e9)), 2 * (size - 1) / size
        assert bound <= run.makespan <= 1.05 * bound
        assert run.bandwidth_use == pytest.approx(bound / run.makespan)


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2, 20), rounds=st.integers(1, 3), pairs=st.integers(1, 12))
def test_any_number_of_chunks_is_sound_and_takes_as_many_steps_as_said(size: int, rounds: int, pairs: int) -> None:
    for algorithm, chunks in (("ring", rounds * size), ("tree", 2 * pairs)):
        plan = spell("all_reduce", algorithm, size, chunks)
        assert plan.check().sound
        assert steps(plan) == num_steps(plan.kind, plan.algorithm, size, chunks)


TWO_NODES = Wire(latency_s=1e-5, bandwidth=1e9, nodes=2, node_latency_s=8e-6, node_bandwidth=2e10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "wire"), [*((n, Wire(latency_s=30e-6, bandwidth=2e9)) for n in (3, 5, 8, 16, 33, 64)), (16, TWO_NODES)]
)
def test_auto_changes_over_where_the_simulator_does(size: int, wire: Wire) -> None:
    large = "ring" if wire.nodes == 1 else "two-level"
    plan = spell("all_reduce", large, size, nodes=wire.nodes)
    trees = [spell("all_reduce", "tree", size, chunks) for chunks in TREE_CHOICES]
    crossover = crossover_bytes(size, wire, large)
    assert large == "ring" or 1e3 < crossover < 0.5 * crossover_bytes(size, wire), "earlier than one ring"
    communication = spelled_out("auto", [("all_reduce", size)], wire)
    for num_bytes, algorithm in ((1.1 * crossover + 8, large), (0.9 * crossover - 8, "tree")):
        if num_bytes >= 0 and (size > 4 or algorithm == large):
            of_trees = min(tree.simulate(num_bytes, wire).makespan for tree in trees)
            told = fastest_tree_seconds(size, num_bytes, wire)
            assert of_trees == pytest.approx(told) if wire.nodes == 1 else of_trees < told, "a bound on several nodes"
            assert (plan.simulate(num_bytes, wire).makespan < told) == (algorithm == large)
            assert choose(communication, "all_reduce", size, num_bytes).algorithm == algorithm


@pytest.mark.parametrize(("nodes", "local", "rounds"), [(2, 2, 1), (2, 3, 2), (3, 2, 1), (4, 4, 1), (2, 8, 1)])
@pytest.mark.parametrize("kind", ["all_reduce", *HALVES])
def test_all_take_as_long_as_said_two_levels_among_them(kind: str, nodes: int, local: int, rounds: int) -> None:
    size = nodes * local
    wire = Wire(latency_s=1e-5, bandwidth=1e9, nodes=nodes, node_latency_s=2e-6, node_bandwidth=2e10)
    plan = spell(kind, "two-level", size, rounds * size, nodes)
    assert plan.check().sound, plan.check().explain()
    assert loads(dumps(plan)) == plan
    others = [spell(kind, "ring", size)]
    others += [spell(kind, "tree", size, chunks) for chunks in (2, 8) if kind == "all_reduce"]
    for num_bytes in (0.0, 1e4, 1e8):
        for one, over in ((plan, wire), (others[0], wire), *((other, SLOW) for other in others)):
            said = spelled_seconds(plan.kind, one.algorithm, size, one.chunks, num_bytes, over)
            assert one.simulate(num_bytes, over).makespan == pytest.approx(said)
            assert native_seconds(plan.kind, size, num_bytes, over) <= said * (1 + 1e-9)
    assert plan.simulate(1e8, wire).sent_bytes == others[0].simulate(1e8, wire).sent_bytes, "as in one ring"
    between = sum(sent.rank // local != received.rank // local for sent, received in plan.messages)
    assert between * size == len(plan.messages) * (nodes - 1) * size // (size - 1), "fewer of them between nodes"


def halved(plan: CollectivePlan) -> CollectivePlan:
    """Return a plan in which everybody sends, then receives."""
    return replace(plan, programs=tuple(tuple(half for s in p for half in halves(s)) for p in plan.programs))


RING = spell("all_reduce", "ring", 4)
FIRST = RING.programs[0][0]
OVERWRITES = replace(FIRST, recv_chunk=FIRST.send_chunk, reduce=False)
ADDING = replace(RING, programs=tuple(tuple(replace(s, reduce=True) for s in p) for p in RING.programs))

BROKEN: list[tuple[CollectivePlan, Point, str]] = [
    (with_step(RING, 0, 5), Point.CHANNELS, "rank 0 never receives what it sends"),
    (with_step(RING, 0, 0, replace(FIRST, send_chunk=0)), Point.CHANNELS, "sends chunk 0, but rank 1 step 0"),
    (halved(RING), Point.DEADLOCK, "4 waits close a circle"),
    (with_step(RING, 0, 0, replace(FIRST, reduce=False)), Point.COMPLETE, "lacks what rank 0 brings"),
    (ADDING, Point.COMPLETE, "a second time"),
    (replace(spell("reduce_scatter", "ring", 3), kind="all_gather"), Point.COMPLETE, "of which it has nothing yet"),
    (with_step(RING, 0, 0, replace(FIRST, to=4)), Point.WELL_FORMED, "rank 4 is not another one of the 4 ranks"),
    (with_step(RING, 0, 0, replace(FIRST, send_chunk=9)), Point.WELL_FORMED, "chunk 9"),
    (with_step(RING, 0, 3, OVERWRITES), Point.WELL_FORMED, "overwrites the chunk that it sends"),
    (replace(RING, programs=RING.programs[:3]), Point.WELL_FORMED, "3 programs"),
    (replace(spell("reduce_scatter", "ring", 4), kind="all_reduce"), Point.COMPLETE, "ends with a chunk 1 that lacks"),
    (CollectivePlan("all_reduce", "ring", 1, 1, ((),)), Point.WELL_FORMED, "at least two ranks and a chunk"),
    (CollectivePlan("all_reduce", "ring", 2, 0, ((), ())), Point.WELL_FORMED, "at least two ranks and a chunk"),
]


@pytest.mark.parametrize(("plan", "point", "words"), BROKEN, ids=[words for _, _, words in BROKEN])
def test_broken_ones_are_refused_in_words(plan: CollectivePlan, point: Point, words: str) -> None:
    verdict = plan.check()
    assert not verdict.sound
    assert {finding.point for finding in verdict.findings} == {point}
    assert words in verdict.explain()
    with pytest.raises(qs.UnsoundError):
        plan.simulate(1.0, FREE)


def test_what_cannot_be_spelled_out() -> None:
    for words, arguments in (
        ("ring over an axis of size 1", ("all_reduce", "ring", 1)),
        ("from 2 to 256 ranks", ("all_reduce", "ring", 1000)),
        ("a tree cannot do all_gather over 4 ranks", ("all_gather", "tree", 4)),
        ("multiple of the number of ranks", ("all_reduce", "ring", 4, 6)),
        ("multiple of 2", ("all_reduce", "tree", 4, 3)),
        ("did you mean 'ring'", ("all_reduce", "rng", 4)),
        ("did you mean 'all_reduce'", ("allreduce", "ring", 4)),
        *(("equally many ranks", ("all_reduce", "two-level", *more)) for more in ((4, 4, 1), (4, 4, 4), (6, 6, 4))),
    ):
        with pytest.raises(qs.UsageError, match=words):
            spell(*arguments)
    with pytest.raises(qs.UsageError, match="ring over an axis of size 1: on mesh pp=2"):
        qs.compile("1f1b", mesh="pp=2", microbatches=4, communication="ring")


def test_files_come_back_as_they_were_and_broken_ones_say_where(tmp_path) -> None:
    for plan in (RING, spell("all_reduce", "tree", 5), spell("all_gather", "ring", 3, 6)):
        plan.save(tmp_path / "plan.json")
        assert CollectivePlan.load(tmp_path / "plan.json") == loads(dumps(plan)) == plan
    for change, words in (
        ({"format": "quintsched.plan"}, "/format"),
        ({"version": 2}, "/version"),
        ({"size": "4"}, "/size"),
        ({"colour": 1}, "/colour: unknown key"),
        ({"programs": [[{"op": "SendAll"}]]}, "/programs/0/0: not a step"),
        ({"programs": [[{"op": "SendChunk", "to": 1}]]}, "/programs/0/0: SendChunk lacks 'chunk'"),
        ({"programs": [[{"op": "SendChunk", "to": 1, "chunk": 0, "x": 1}]]}, "/programs/0/0: SendChunk has no 'x'"),
        ({"programs": [[{"op": "SendChunk", "to": True, "chunk": 0}]]}, "/programs/0/0/to: true is not a whole number"),
        ({"programs": [[{"op": "RecvChunk", "source": 1, "chunk": 0, "reduce": 1}]]}, "true or false"),
    ):
        with pytest.raises(qs.InputError, match=words):
            loads(json.dumps(json.loads(dumps(RING)) | change))


def test_a_plan_holds_what_its_buckets_call() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2,ep=3", microbatches=4, communication="ring")
    assert {(p.kind, p.size) for p in plan.communication.plans.values()} == {("all_reduce", 2), ("all_reduce", 6)}
    assert qs.Plan.from_json(plan.to_json()) == plan
    assert "ring" in plan.title
    assert "collectives" not in qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4).to_json()


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
    ):
        with pytest.raises(qs.InputError, match=words):
            qs.Plan.from_json(json.dumps(json.loads(plan.to_json()) | change))
    broken = replace(plan, communication=Communication("ring", {"mine": halved(RING)}))
    assert qs.Plan.from_json(broken.to_json()) == broken
    assert not broken.check().sound
    assert "collective 'mine': rank 0: rank 0 step 0, SendChunk" in broken.check().explain()


SEEDS = small_collectives()


def assert_agreement(plan: CollectivePlan) -> bool:
    """The proof and the run agree: on the result, and on whether what nobody knows is sent or added to.

    What is sound leaves what is promised in algebra too; what algebra refuses is not right in the run either.
    """
    verdict, judge = plan.check(), MiniJudge(plan)
    promise = broken_promise(plan)
    assert promise is None or not (verdict.sound or judge.right), (promise, verdict.explain())
    assert verdict.sound == (judge.right and judge.careful), (verdict.explain(), judge.right, judge.careful)
    return verdict.sound


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 1500), *(pytest.param(seed, 5000, marks=pytest.mark.slow) for seed in range(1, 11))]
)
def test_proof_and_run_agree_on_mutants(seed: int, count: int) -> None:
    random = Random(seed)
    sound = sum(assert_agreement(mini_mutant(random.choice(SEEDS), random)) for _ in range(count))
    assert sound > 50


def test_an_all_gather_that_adds_to_what_stood_there_is_refused_in_words() -> None:
    plan = qs.compile("1f1b", mesh="dp=4,pp=2", microbatches=4, zero=1, communication="ring")
    name, mini = next((name, mini) for name, mini in plan.communication.plans.items() if mini.kind == "all_gather")
    adding = with_step(mini, 0, 0, replace(mini.programs[0][0], reduce=True))
    plans = {**plan.communication.plans, name: adding}
    changed = replace(plan, communication=Communication("ring", plans, plan.communication.wire))
    assert f"collective {name!r}: rank 0 ends with something else in chunk 3 than" in equivalence(changed).explain()
    verdict = changed.check()
    assert {finding.point for finding in verdict.findings} == {Point.COMPLETE}
    assert "adds to chunk 3, of which it has nothing yet: what stood there before would be in" in verdict.explain()


def test_replicas_that_add_up_in_different_orders_would_drift_apart() -> None:
    """Rank 1 ends with ((0 + 1) + 2) + 3, all others with (0 + 1) + (2 + 3)."""
    pairs = [SendRecv(rank ^ 1, 0, rank ^ 1, 0, True) for rank in range(4)]
    programs = (
        (pairs[0], RecvChunk(2, 0, True), SendChunk(2, 0), SendChunk(3, 0)),
        (pairs[1], RecvChunk(2, 0, True), RecvChunk(3, 0, True)),
        (SendChunk(1, 0), pairs[2], SendChunk(0, 0), RecvChunk(0, 0, False)),
        (SendChunk(1, 0), pairs[3], RecvChunk(0, 0, False)),
    )
    plan = CollectivePlan("all_reduce", "tree", 4, 1, programs)
    assert not assert_agreement(plan)
    (finding,) = plan.check().findings
    assert finding.message.startswith("rank 1 ends with a chunk 0 that was added up in another order than that of rank")
    assert assert_agreement(doubling()), "either of two may come first in a sum"
    both = tuple((SendRecv(1 - rank, 0, 1 - rank, 0, True),) for rank in range(2))
    assert assert_agreement(CollectivePlan("all_reduce", "ring", 2, 1, both)), "a pair may exchange and add one chunk"
