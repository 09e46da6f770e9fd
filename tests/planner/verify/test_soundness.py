"""The checker against two other opinions: a run with rendezvous, and hosts that issue each program in order."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir import instruction_set as ops
from quintsched.ir.diagnostics import Point
from quintsched.verify.equivalence import equivalence
from tests.planner.verify.edits import edited, move, swap
from tests.planner.verify.judge import Judge
from tests.planner.verify.judge_hosts import Hosts
from tests.planner.verify.mutants import any_mutant, reordered, with_program
from tests.planner.verify.small_plans import DRAWN, OVERLAPPING, TIED, any_plan, held_back


@st.composite
def mutants(draw: st.DrawFn) -> qs.Plan:
    """A plan with 1 to 4 faults, or with changes that do no harm."""
    return any_mutant(draw(st.sampled_from(DRAWN)).plan, draw(st.randoms(use_true_random=False)))


def assert_agreement(plan: qs.Plan) -> None:
    """The verdict and the run agree on soundness, and on deadlock wherever the checker says anything about it.

    So do hosts that launch collectives, on NCCL and on gloo. What is sound computes the sequential gradient, as algebra
    has it.
    """
    verdict, run = plan.check(profile="blocking"), Judge(plan)
    assert verdict.sound == run.good, (verdict.explain(), run.finished, run.faults)
    if verdict.profiles:
        assert verdict.profiles["blocking"] == run.finished, verdict.explain()
    if not run.finished:
        assert not verdict.sound
    assert not verdict.sound or equivalence(plan).holds, equivalence(plan).explain()
    if not any(finding.point is Point.DATA_FLOW for finding in verdict.findings) and verdict.profiles:
        free = list(verdict.profiles.values())
        assert free == sorted(free), "a stricter transport is free where a laxer one is not"
        for profile in ("channel", "tagged"):
            assert verdict.profiles[profile] == Hosts(plan, profile).finish(), verdict.explain()


@settings(max_examples=500)
@given(plan=mutants())
def test_checker_and_run_agree_on_mutants(plan):
    assert_agreement(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipes", "seed", "count"),
    [*(("all", seed, 2600) for seed in range(40)), *(("overlapping", seed, 2500) for seed in range(8))],
)
def test_checker_and_run_agree_on_many_thousand_mutants(recipes, seed, count):
    """104,000 of all schedules there are, 20,000 of plans with pairs: of those that are sound most have pairs still."""
    random, sound = Random(seed), Counter[bool]()
    for _ in range(count):
        plan = any_mutant(any_plan(DRAWN if recipes == "all" else OVERLAPPING, random), random)
        assert_agreement(plan)
        if recipes == "overlapping" and plan.check(profile="blocking").sound:
            sound[len(plan.columns.rows_where(ops.Overlap)) > 0] += 1
    assert recipes == "all" or sound[True] > 200, sound


def test_checker_and_run_agree_on_orders_of_collectives_across_groups():
    random, free = Random(0), Counter[bool]()
    for _ in range(60):
        plan = reordered(any_plan(TIED, random), random)
        assert_agreement(plan)
        free[plan.check().profiles.get("channel", False)] += 1
    assert min(free[True], free[False]) > 10, free


def test_mutants_offend_against_every_point():
    random = Random(0)
    verdicts = [any_mutant(any_plan(DRAWN, random), random).check(profile="blocking") for _ in range(160)]
    points = {finding.point for verdict in verdicts for finding in verdict.findings}
    assert points == {*Point} - {Point.MEMORY}
    assert sum(verdict.sound for verdict in verdicts) > 4, "some changes do no harm"


def test_a_verdict_marks_the_cells_and_a_value_that_comes_too_late_is_one_fault():
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    forward, backward, *rest = plan.programs[0]
    verdict = with_program(plan, 0, [backward, forward, *rest]).check(profile="blocking")
    assert [finding.point for finding in verdict.findings] == [Point.DATA_FLOW]
    assert "made only later, by rank 0 instruction 1" in verdict.explain()
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    forward, backward, *rest = plan.programs[1][1:]
    verdict = with_program(plan, 1, [plan.programs[1][0], backward, *rest]).check()
    assert not verdict.sound
    assert ">1B0<" in verdict.explain()
    with pytest.raises(qs.UnsoundError, match="rank 1 runs Fwd"):
        verdict.raise_if_unsound()


def test_a_sound_plan_says_why_it_is_not_free_under_stricter_profiles():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=3)
    verdict = edited(plan, 0, swap(ops.SendAct(0, 1, 1), ops.RecvGrad(0, 0, 1))).check()
    assert verdict.sound
    assert set(verdict.cycles) == {name for name, free in verdict.profiles.items() if not free} >= {"blocking"}
    head, *reasons = verdict.explain().splitlines()
    assert "free of deadlock under" in head
    assert reasons[0].startswith("not free under blocking")
    assert "rank 0: " in reasons[0]
    assert "must end before" in reasons[0]
    assert plan.check().cycles == {}


def test_a_circle_that_a_host_closes_is_said_in_words() -> None:
    plan = held_back()
    verdict = plan.check(profile="channel")
    assert not verdict.sound
    assert [name for name, is_free in verdict.profiles.items() if is_free] == ["tagged"]
    assert plan.simulate().makespan, "its queues alone would let it pass"
    said = verdict.explain()
    assert "under the transport profile 'channel' 2 waits close a circle" in said
    assert "rank 0: 3 RecvGrad(stage=0, microbatch=0, peer=1) must end before 5 SendAct(" in said
    assert "rank 1: 3 RecvAct(stage=1, microbatch=1, peer=0) must end before 5 SendGrad(" in said
    assert "rank 0 from 0: 0F0 0SA0 0F1 >0RG0< 0B0 0SA1 0RG1 0B1" in said


def test_a_host_waits_for_a_loan_before_it_sends_what_is_behind_it() -> None:
    lent = qs.compile("1f1b", mesh="pp=4", microbatches=8, lend=3)
    early = edited(lent, 3, move(ops.HoldAct(0, 5, 0), before=ops.SendGrad(3, 2, 2)))
    assert_agreement(early)
    verdict = early.check(profile="channel")
    assert not verdict.sound
    assert [name for name, is_free in verdict.profiles.items() if is_free] == ["tagged"]


def test_a_gather_waits_for_a_sum_that_its_rank_launched_before() -> None:
    sharded = qs.compile("interleaved-1f1b", mesh="dp=3,pp=2", microbatches=2, zero=3)
    early = edited(sharded, 0, move(ops.ShareMetrics, after=ops.Fwd(0, 0)))
    assert_agreement(early)
    assert [name for name, is_free in early.check().profiles.items() if is_free] == ["tagged"]


def test_tags_do_not_help_where_a_bucket_waits_for_a_sum_that_waits_for_it() -> None:
    tied = qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=2, chunks=3, tied={"w": (4, 5)})
    sync, bucket = ops.SyncTied("w", (4, 5)), ops.AllReduceBucket(4, 0, ("dp",))
    early = [i for i in tied.programs[0] if i not in (sync, bucket)]
    after = 1 + max(k for k, i in enumerate(early) if isinstance(i, ops.Bwd) and i.stage == 4)
    plan = replace(tied, programs=((*early[:after], sync, bucket, *early[after:]), tied.programs[1]))
    assert not Hosts(plan, "tagged").finish()
    verdict = plan.check(profile="tagged")
    assert not any(verdict.profiles.values())
    assert "rank 0: 21 SyncTied(params=w, stages=4+5) must end before" in verdict.explain()
