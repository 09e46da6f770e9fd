"""Plans whose queues are free of deadlock, but not where a host issues each rank's program in order: `check` refuses.

A second opinion, `Hosts`, walks the programs as hosts do.
"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.graph.event_edges import build_graph
from quintsched.graph.plan_events import Events
from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import AllReduceBucket, Bwd, Message, SyncTied
from tests.planner.verify.judge_hosts import Hosts
from tests.planner.verify.small_plans import held_back

PROFILES = ("channel", "tagged")
PLANS = [
    qs.compile("gpipe", mesh="pp=2", microbatches=3),
    qs.compile("1f1b", mesh="pp=3", microbatches=4, tied={"w": (0, 2)}),
    qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=2, chunks=2, tied={"w": (0, 1), "v": (2, 3)}),
    qs.compile("zb-h1", mesh="pp=2", microbatches=3),
    qs.compile("zbv", mesh="pp=2", microbatches=4),
    qs.compile("dualpipe", mesh="pp=2", microbatches=4),
]


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


def test_tags_do_not_help_where_a_bucket_waits_for_a_sum_that_waits_for_it() -> None:
    tied = qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=2, chunks=3, tied={"w": (4, 5)})
    sync, bucket = SyncTied("w", (4, 5)), AllReduceBucket(4, 0, ("dp",))
    early = [i for i in tied.programs[0] if i not in (sync, bucket)]
    after = 1 + max(k for k, i in enumerate(early) if isinstance(i, Bwd) and i.stage == 4)
    plan = replace(tied, programs=((*early[:after], sync, bucket, *early[after:]), tied.programs[1]))
    assert not Hosts(plan, "tagged").finish()
    verdict = plan.check(profile="tagged")
    assert not any(verdict.profiles.values())
    assert "rank 0: 21 SyncTied(params=w, stages=4+5) must end before" in verdict.explain()


def moved(plan: qs.Plan, profile: str, random: Random) -> qs.Plan:
    """Move messages and sums of gradients to other places where the plan stays sound under the profile."""
    for _ in range(random.randrange(4, 12)):
        rank = random.randrange(len(plan.programs))
        program = list(plan.programs[rank])
        index = random.choice([k for k, i in enumerate(program) if isinstance(i, Message | SyncTied | AllReduceBucket)])
        program.insert(max(0, index + random.randint(-8, 8)), program.pop(index))
        other = replace(plan, programs=(*plan.programs[:rank], tuple(program), *plan.programs[rank + 1 :]))
        if queues_are_free(other, profile):
            plan = other
    return plan


def queues_are_free(plan: qs.Plan, profile: str) -> bool:
    """Whether a plan is sound but for the order in which hosts issue it."""
    if any(finding.point is not Point.DEADLOCK for finding in plan.check(profile=profile).findings):
        return False
    return build_graph(Events.merge(plan), plan.flows, find_profile(profile)).run_events().finished


@pytest.mark.sampled(2)
@pytest.mark.parametrize("profile", PROFILES)
@given(plan=st.sampled_from(PLANS), random=st.randoms(use_true_random=False))
def test_what_is_refused_is_what_hosts_cannot_finish(profile: str, plan: qs.Plan, random: Random) -> None:
    plan = moved(plan, profile, random)
    verdict = plan.check(profile=profile)
    assert verdict.sound == Hosts(plan, profile).finish(), verdict.explain()
    assert list(verdict.profiles.values()) == sorted(verdict.profiles.values()), "a laxer profile is not free"


def test_the_moves_above_make_plans_of_both_kinds() -> None:
    random = Random(0)
    found = [Hosts(moved(plan, "channel", random), "channel").finish() for plan in PLANS for _ in range(2)]
    assert 1 < sum(found) < 11
