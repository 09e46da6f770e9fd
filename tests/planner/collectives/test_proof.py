"""The proof of a spelled-out collective against a run of it with garbage in the buffers."""

from dataclasses import replace
from random import Random

import pytest

import quintsched as qs
from quintsched.collectives import CollectivePlan, Communication
from quintsched.collectives.collective_program import RecvChunk, SendChunk, SendRecv
from quintsched.ir.diagnostics import Point
from quintsched.verify.equivalence import equivalence
from quintsched.verify.symbolic_collective import broken_promise
from tests.planner.collectives.mini_mutants import MiniJudge, doubling, mini_mutant, small_collectives, with_step

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


def test_no_step_may_add_what_it_should_store_nor_store_what_it_should_add() -> None:
    for plan in SEEDS:
        for rank, program in enumerate(plan.programs):
            for index, step in enumerate(program):
                if hasattr(step, "reduce"):
                    assert not assert_agreement(with_step(plan, rank, index, replace(step, reduce=not step.reduce)))


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
