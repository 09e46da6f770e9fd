"""The proof of a spelled-out collective against a run of it with garbage in the buffers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import quintsched as qs
from quintsched.collectives import CollectivePlan, Communication
from quintsched.collectives.collective_program import RecvChunk, SendChunk, SendRecv
from quintsched.ir.diagnostics import Point
from quintsched.verify.equivalence import equivalence
from quintsched.verify.symbolic_collective import broken_promise
from tests.planner.collectives.mini_mutants import MiniJudge, doubling, mini_mutant, small_collectives

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


def test_proof_and_run_agree_on_mutants() -> None:
    random = Random(0)
    sound = sum(assert_agreement(mini_mutant(random.choice(SEEDS), random)) for _ in range(1500))
    assert sound > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_proof_and_run_agree_on_many_mutants(seed: int) -> None:
    random = Random(seed)
    for _ in range(5000):
        assert_agreement(mini_mutant(random.choice(SEEDS), random))


@pytest.mark.parametrize("plan", SEEDS, ids=lambda plan: plan.title)
def test_no_step_may_add_what_it_should_store_nor_store_what_it_should_add(plan: CollectivePlan) -> None:
    for rank, program in enumerate(plan.programs):
        for index, step in enumerate(program):
            if hasattr(step, "reduce"):
                other = (*program[:index], replace(step, reduce=not step.reduce), *program[index + 1 :])
                programs = (*plan.programs[:rank], other, *plan.programs[rank + 1 :])
                assert not assert_agreement(replace(plan, programs=programs))


def test_an_all_gather_that_adds_to_what_stood_there_is_refused_in_words() -> None:
    plan = qs.compile("1f1b", mesh="dp=4,pp=2", microbatches=4, zero=1, communication="ring")
    name = next(name for name, mini in plan.communication.plans.items() if mini.kind == "all_gather")
    mini = plan.communication.plans[name]
    first = mini.programs[0][0]
    assert isinstance(first, SendRecv)
    adding = replace(mini, programs=((replace(first, reduce=True), *mini.programs[0][1:]), *mini.programs[1:]))
    plans = {**plan.communication.plans, name: adding}
    changed = replace(plan, communication=Communication("ring", plans, plan.communication.wire))
    assert plan.check().sound
    assert equivalence(plan).holds
    assert f"collective {name!r}: rank 0 ends with something else in chunk 3 than" in equivalence(changed).explain()
    for profile in ("blocking", "channel", "tagged"):
        verdict = changed.check(profile=profile)
        assert {finding.point for finding in verdict.findings} == {Point.COMPLETE}
        assert (
            "adds to chunk 3, of which it has nothing yet: what stood there before would be in the" in verdict.explain()
        )


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


@pytest.mark.parametrize(("size", "chunks"), [(2, 0), (1, 1), (0, 0)])
def test_nothing_to_do_is_no_collective(size: int, chunks: int) -> None:
    verdict = CollectivePlan("all_reduce", "ring", size, chunks, ((),) * size).check()
    assert {finding.point for finding in verdict.findings} == {Point.WELL_FORMED}
    assert "at least two ranks and a chunk" in verdict.explain()
