"""Ranks of a replica that were given batches of other lengths: who is odd is named, and not who died of it."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.stall_report import StallReport
from quintsched.stalls.states import BlockingCall, Fate, GivenBatch, RankState

PLAN = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=4)
ABORTED = Fate("signal", 6)


def states(given, fates=(), phase="step"):
    """Return the states of ranks that were given so many samples in their latest batch, the seventh."""
    return [
        RankState(rank, "a", 10 + rank, phase, 3, "train", 4, 5.0, 0.1, dict(fates).get(rank), None, 3, given=one)
        for rank, one in enumerate(given)
    ]


EVEN = [GivenBatch(7, 8, 0, 8)] * 8


FEWER = GivenBatch(7, 4, 0, 4)


def odd(*ranks, given=FEWER):
    return [given if rank in ranks else usual for rank, usual in enumerate(EVEN)]


@pytest.mark.parametrize("fate", [ABORTED, Fate("exit", 134), Fate("error", 1, "ValueError: sizes differ")])
def test_the_odd_one_is_named_and_not_who_died(fate):
    report = find_culprit(PLAN, states(odd(4), {5: fate}))
    assert report.ranks == (4,)
    first = report.words().splitlines()[0]
    assert first.startswith("rank 4 (host a, dp=1, pp=0, tp=0) was given other data in step 3 than most ranks of its")
    assert "ranks 5, 6 and 7 were given 8 samples, and rank 4 was given 4 samples; then rank 5" in first
    assert StallReport.from_json(report.to_json()).words() == report.words()


def test_of_two_nobody_is_odd():
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=4)
    report = find_culprit(plan, states(odd(1)[:2], {0: ABORTED}))
    assert report.ranks == (0, 1)
    (words,) = report.words().splitlines()
    assert words.startswith("ranks 0 and 1 were given different data in step 3, and belong to one replica: rank 0 was")
    assert "nobody can be told from the other; then rank 0 was killed by SIGABRT" in words


def test_a_stall_of_ranks_with_other_data_is_theirs():
    found = [
        replace(one, awaits=BlockingCall("collective", ranks=(0, 1)) if one.rank < 2 else None)
        for one in states(odd(1))
    ]
    assert find_culprit(PLAN, found).ranks == (1,)
