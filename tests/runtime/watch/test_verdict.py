"""Verdicts from the reports of ranks: the exit code of the run, the time of an error, the text on each rank."""

from itertools import product

import pytest

import quintsched as qs
from quintsched.runtime.watch.announce_verdict import Plans, Verdict, make_verdict, own_errors
from quintsched.runtime.watch.position_in_shared_memory import NOTHING, WORLD_CODE, RankPosition
from quintsched.runtime.watch.verdict_timing import ErrorKind, Member
from quintsched.stalls.last_reported_rank_states import Fate

NOW_S = 70_000.0
STEP = RankPosition(4, 7, 0, "step", NOTHING, 7, 14)
PLANS = Plans()
PLANS.add_plan(0, qs.compile("1f1b", mesh="pp=2", microbatches=2).to_json().encode())


def members(place: RankPosition = STEP) -> list[Member]:
    """Return two ranks in the midst of a step."""
    return [Member(rank, "a", place=place, changed_s=NOW_S - 3, has_come=True, is_here=True) for rank in range(2)]


def judge(ranks: list[Member]) -> Verdict:
    return make_verdict(ranks, PLANS, None, NOW_S, still_s=1.0)


@pytest.mark.parametrize(("kind", "code", "again"), [("refusal", 3, True), ("refusal", 2, True), ("own", 1, False)])
def test_an_error_has_its_exit_code_on_whatever_rank_and_however_that_ends(
    kind: ErrorKind, code: int, again: bool
) -> None:
    for rank, end in product((0, 1), (None, Fate("exit", 3), Fate("exit", 1), Fate("signal", 9))):
        ranks = members()
        ranks[rank].fail(kind, "what it said", code, NOW_S - 2)
        if end is not None:
            ranks[rank].record_end(end, NOW_S - 1)
        found = judge(ranks)
        assert (found.culprits, found.exit_code, found.comes_again) == ((rank,), code, again)


def test_who_raised_long_after_another_was_killed_is_not_the_first() -> None:
    ranks = members()
    ranks[0].record_end(Fate("signal", 9), NOW_S - 5)
    ranks[1].fail("own", "RuntimeError: something of a library's", 1, NOW_S - 2)
    assert (judge(ranks).culprits, judge(ranks).exit_code) == ((0,), 4)


@pytest.mark.parametrize(
    ("others", "own"),
    [
        ("waits", True),
        ("complains", True),
        ("complains alike", True),
        ("was killed", False),
        ("raised", False),
        ("left its loop", True),
        ("gave up", True),
    ],
)
def test_what_failed_in_code_that_communicates_is_its_own_where_no_other_rank_is_to_blame(
    others: str, own: bool
) -> None:
    ranks = members()
    ranks[1].fail("unclear", "RuntimeError: gloo said so", 1, NOW_S - 2)
    ranks[0].place = STEP._replace(wait=WORLD_CODE)
    match others:
        case "complains" | "gave up":
            ranks[0].fail("stall", "a peer died", 1, NOW_S - 2)
        case "complains alike":
            ranks[0].fail("unclear", "RuntimeError: gloo said so", 1, NOW_S - 2)
        case "was killed":
            ranks[0].record_end(Fate("signal", 9), NOW_S - 1)
        case "raised":
            ranks[0].fail("own", "ValueError", 1, NOW_S - 1)
        case "left its loop":
            ranks[0].has_ended = True
    if others == "gave up":
        ranks[0].record_end(Fate("exit", 4), NOW_S - 1)
    found = own_errors(ranks, PLANS, NOW_S, still_s=1.0)
    assert [member.rank for member in found] == [member.rank for member in ranks if member.is_unclear] * own
    for member in found:
        member.own_up()
    if own:
        assert (judge(ranks).exit_code, "gloo said so" in judge(ranks).message) == (1, True)
