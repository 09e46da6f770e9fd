"""Time of a verdict: by a clock that the tests move, and members that they write."""

import pytest

from quintsched.runtime.watch.rank_position import NOTHING, START, WORLD_CODE, RankPosition
from quintsched.runtime.watch.stall_limits import FLOOR_S, Patience, PositionTracker
from quintsched.runtime.watch.verdict_timing import Judge, Member, Ruling
from quintsched.stalls.states import Fate

STEP = RankPosition(4, 7, 0, "step", NOTHING, 7, 14)
KILLED = Fate("signal", 9)


class Run:
    """Three ranks in the midst of a step, and their judge."""

    def __init__(self, place: RankPosition = STEP) -> None:
        self.members = [Member(rank, place=place, has_come=True, is_here=True) for rank in range(3)]
        self.judge = Judge(self.members, PositionTracker(Patience()))
        self.now_s = 50.0
        self.judge.look(self.now_s)

    def after(self, seconds: float) -> Ruling:
        """Look every tenth of a second, and return the last ruling, or the first that ends the run."""
        until_s, ruling = self.now_s + seconds, Ruling.GO_ON
        while self.now_s < until_s - 1e-6 and ruling in (Ruling.GO_ON, Ruling.ASK):
            self.now_s += 0.1
            ruling = self.judge.look(self.now_s)
        return ruling


def test_a_killed_rank_is_judged_when_late_words_are_in() -> None:
    run = Run()
    run.members[1].record_end(KILLED, run.now_s)
    assert run.after(0.2) is Ruling.GO_ON
    assert run.after(0.2) is Ruling.JUDGE


def test_ranks_that_complain_are_heard_at_once_where_another_has_ended() -> None:
    run = Run()
    run.members[0].error = "stall", "connection closed by peer"
    assert run.after(0.5) is Ruling.GO_ON
    run.members[1].record_end(KILLED, run.now_s)
    assert run.after(0.4) is Ruling.JUDGE


def test_a_complaint_without_a_cause_is_judged_after_a_while() -> None:
    run = Run()
    run.members[0].error = "stall", "timed out"
    assert run.after(1.8) is Ruling.GO_ON
    assert run.after(0.5) is Ruling.JUDGE


def test_the_traceback_of_a_rank_comes_before_the_verdict() -> None:
    run = Run()
    run.members[1].error = "own", "ValueError: boom"
    assert run.after(1.0) is Ruling.GO_ON
    run.members[1].record_end(Fate("exit", 1), run.now_s)
    assert run.after(0.4) is Ruling.JUDGE


def test_ranks_that_all_refuse_are_left_to_say_so() -> None:
    run = Run()
    for member in run.members:
        member.error = "refusal", "the batch does not divide"
        assert run.after(0.3) in (Ruling.GO_ON, Ruling.OVER)
    run.members[0].record_end(Fate("exit", 3), run.now_s)
    assert run.after(10) is Ruling.OVER


def test_a_rank_that_refuses_alone_is_judged() -> None:
    run = Run()
    run.members[2].error = "refusal", "the batch does not divide"
    run.members[2].record_end(Fate("exit", 3), run.now_s)
    assert run.after(5) is Ruling.JUDGE


def test_a_refusal_that_others_lost_their_peer_by_is_judged_at_once() -> None:
    run = Run()
    run.members[2].error = "refusal", "the batch does not divide"
    run.members[0].error = "stall", "connection closed by peer"
    assert run.after(0.4) is Ruling.JUDGE


def test_a_rank_that_refuses_before_others_have_connected_is_judged_when_they_have() -> None:
    run = Run()
    for member in run.members:
        member.has_come = False
    run.members[2].fail("refusal", "the import failed", 2, run.now_s)
    assert run.after(6) is Ruling.GO_ON
    run.members[0].has_come = run.members[1].has_come = True
    assert run.after(0.1) is Ruling.JUDGE


def test_a_run_that_ends_as_it_should_is_over() -> None:
    run = Run()
    for member in run.members:
        assert run.after(0.3) is Ruling.GO_ON
        member.has_ended = True
    assert run.after(0.1) is Ruling.OVER


def test_a_run_that_is_ended_from_outside_needs_no_verdict() -> None:
    run = Run()
    for member in run.members:
        member.record_end(Fate("signal", 15), run.now_s)
    assert run.after(1) is Ruling.OVER


def test_processes_that_come_to_their_end_without_a_word_are_no_failure() -> None:
    run = Run(START)
    for member in run.members:
        member.record_end(Fate("exit", 0), run.now_s)
    assert run.after(10) is Ruling.OVER


def test_one_that_leaves_in_set_up_is_judged_if_another_waits_for_it() -> None:
    run = Run(START)
    run.members[0].record_end(Fate("exit", 0), run.now_s)
    assert run.after(3) is Ruling.GO_ON
    run.members[1].place = START._replace(wait=WORLD_CODE)
    assert run.after(1.8) is Ruling.JUDGE


@pytest.mark.parametrize("moves", [False, True])
def test_a_stall_is_judged_unless_somebody_moves_while_it_settles(moves: bool) -> None:
    run = Run()
    for member in run.members:
        member.place = STEP._replace(step=8, entered=15)
        run.after(0.1)
        member.place = STEP._replace(step=9, entered=16)
    for number in range(6):
        for member in run.members:
            member.place = STEP._replace(step=10 + number, entered=17 + number)
        run.after(0.2)
    rulings = []
    while Ruling.ASK not in rulings:
        run.now_s += 0.1
        rulings.append(run.judge.look(run.now_s))
    assert abs(len(rulings) * 0.1 - FLOOR_S) < 1
    if moves:
        run.members[0].place = STEP._replace(at=5, step=30)
    assert run.after(0.5) is (Ruling.GO_ON if moves else Ruling.JUDGE)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_complaint_waits_for_a_silent_machine_to_be_found_cut_off(is_cut: bool) -> None:
    run = Run()
    away = run.members[2]
    away.is_here, away.heard_s = False, run.now_s
    run.members[0].error = "stall", "timed out"
    away.heard_s = run.now_s - 5
    assert run.after(5) is Ruling.GO_ON
    if is_cut:
        away.record_end(Fate("unreachable"), run.now_s)
        assert run.after(0.4) is Ruling.JUDGE
    else:
        assert run.after(4) is Ruling.GO_ON
        assert run.after(2) is Ruling.JUDGE


def test_a_stall_waits_for_the_answers_of_other_machines() -> None:
    run = Run()
    away = run.members[2]
    away.is_here, away.heard_s = False, run.now_s
    rulings = []
    while Ruling.ASK not in rulings:
        away.heard_s = run.now_s
        run.now_s += 1.0
        rulings.append(run.judge.look(run.now_s))
    assert run.after(5) is Ruling.GO_ON
    away.heard_s = run.now_s
    assert run.after(0.1) is Ruling.JUDGE
