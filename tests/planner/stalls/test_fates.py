"""Processes that ended: who ended first is to blame, who ended by that is not; and what is said of it."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.stall_report import StallReport
from quintsched.stalls.states import BlockingCall, Fate, RankState

PLAN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4)


def state(rank, fate=None, *, index=4, awaits=None, phase="step", host="a", heard_s=0.1, since_s=5.0):
    return RankState(rank, host, 10 + rank, phase, 3, "train", index, since_s, heard_s, fate, awaits, 3)


def find(*fates, **extras):
    return find_culprit(PLAN, [state(rank, fate, **extras) for rank, fate in enumerate(fates)])


LOST = Fate("error", 4, "StallError: rank 1 receiving from rank 0: a peer died", 0.2)


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        (Fate("signal", 9), "was killed by SIGKILL"),
        (Fate("signal", 64), "was killed by SIGRTMAX"),
        (Fate("signal", 99), "was killed by signal 99"),
        (Fate("exit", 5), "ended with exit code 5"),
        (Fate("exit", 0), "ended with exit code 0"),
        (Fate("error", 1, "ValueError: no such digit"), "raised ValueError: no such digit"),
        (Fate("error", 1, "KeyError"), "raised KeyError (exit code 1)"),
        (Fate("error", 1, "torch.cuda.OutOfMemoryError: 2 GiB"), "raised torch.cuda.OutOfMemoryError: 2 GiB"),
        (
            Fate("error", 1, "the loss function raised ValueError: no"),
            "failed: the loss function raised ValueError: no",
        ),
        (Fate("error", 2, "m.py:3: the import failed"), "failed: m.py:3: the import failed (exit code 2)"),
        (Fate("error", 1), "raised an error"),
        (Fate("gone"), "ended, nobody saw how"),
        (Fate("stopped", 19), "is stopped, as by SIGSTOP"),
        (Fate("unreachable"), "cannot be reached"),
        (Fate("silent"), "does not answer, as if it were stopped"),
    ],
)
def test_a_process_that_failed_is_named_with_its_fate(fate, words):
    report = find(None, LOST, fate, Fate("exit", 4))
    assert report.ranks == (2,)
    first = report.words().splitlines()[0]
    assert first.startswith(f"rank 2 (host a, dp=1, pp=0) {words}"), first
    assert "in step 3 at instruction 4 of 20: RecvGrad(stage=0, microbatch=0, peer=3)" in first


def test_who_ended_first_is_to_blame():
    late, soon = Fate("error", 1, "ValueError: mine", 4.0), Fate("signal", 11, ago_s=1.5)
    assert find(None, soon, late, None).ranks == (2,)
    assert find(None, Fate("signal", 15, ago_s=0.4), Fate("error", 1, "ValueError", 0.3), None).ranks == (2,)
    assert find(None, Fate("signal", 9, ago_s=0.3), Fate("exit", 1, ago_s=0.4), None).ranks == (1,), "at about one time"
    assert find(None, Fate("unreachable", ago_s=9.0), Fate("exit", 5, ago_s=0.4), None).ranks == (2,)


def test_a_host_that_died_is_several_culprits():
    states = [
        state(rank, Fate("signal", 9, ago_s=0.2 + rank / 100) if rank > 1 else None, host="ab"[rank > 1])
        for rank in range(4)
    ]
    assert find_culprit(PLAN, states).ranks == (2, 3)
    states[1] = state(1, Fate("signal", 9, ago_s=0.21), host="c")
    assert find_culprit(PLAN, states).ranks in ((2, 3), (1,))
    away = [state(rank, Fate("unreachable", ago_s=0.5) if rank > 1 else None, host="abcd"[rank]) for rank in range(4)]
    assert find_culprit(PLAN, away).ranks == (2, 3)


def test_nobody_is_named_where_no_other_host_is_heard_of():
    lost = Fate("unreachable", ago_s=0.5)
    two = [state(rank, lost if rank > 1 else None, host="ab"[rank > 1]) for rank in range(4)]
    assert find_culprit(PLAN, two).ranks == ()
    words = find_culprit(PLAN, two).words()
    assert words.startswith("nobody can be told from the others: host a and host b cannot reach each other, and either")
    assert "rank 2 (host b) cannot be reached" in words.splitlines()[1]
    four = [state(rank, lost if rank == 1 else None, host="abcd"[rank], heard_s=9.0 * (rank > 0)) for rank in range(4)]
    assert find_culprit(PLAN, four).ranks == (), "the others will be found to be out of reach too"
    four[2] = state(2, host="c", heard_s=0.9)
    assert find_culprit(PLAN, four).ranks == (1,)
    four[3] = state(3, Fate("signal", 9, ago_s=0.4), host="d")
    assert find_culprit(PLAN, four).ranks == (3,)


def test_victims_alone_are_not_to_blame():
    assert find(LOST, LOST, Fate("exit", 4), LOST).ranks == ()
    assert find(None, Fate("exit", 0), None, None, phase="ended", index=None).ranks == ()
    words = find(LOST, LOST, LOST, LOST).words()
    assert words.startswith("nobody can be told from the others")
    assert (
        "rank 3 (host a) raised StallError: rank 1 receiving from rank 0: a peer died (exit code 4) in step 3 at"
        in words
    )
    assert "rank 3 (host a) in step 3 at instruction 4 since 5.0 s" in find(None, None, None, None).words()


def test_victims_tell_who_stands():
    waits = BlockingCall("receive", 4)
    report = find_culprit(
        PLAN,
        [
            state(0, LOST, awaits=waits),
            state(1, awaits=BlockingCall("nothing"), index=1),
            state(2, LOST, awaits=BlockingCall("collective", ranks=(0, 1, 2, 3)), index=None),
            state(3, LOST, awaits=BlockingCall("collective", ranks=(0, 1, 2, 3)), index=None),
        ],
    )
    assert report.ranks == (1,)
    assert [link.waiter.rank for link in report.chain] == [0, 2, 3]


def test_an_early_end_is_found_by_those_who_wait():
    world = BlockingCall("collective", ranks=(0, 1, 2, 3))
    states = [state(rank, awaits=world, index=None) for rank in range(3)]
    ended = RankState(3, "a", 13, "ended", 2, "train", None, 60.0, 60.0, Fate("exit", 0), BlockingCall("nothing"), 2)
    report = find_culprit(PLAN, [*states, ended])
    assert report.ranks == (3,)
    assert "at the end of its run after step 2" in report.words()


def test_a_message_that_does_not_fit_is_its_senders():
    fate = Fate("error", 3, "MisfitError: 12 bytes, not 16")
    report = find_culprit(
        PLAN, [state(0, index=6), state(1, fate, index=1, awaits=BlockingCall("receive", 0)), state(2), state(3)]
    )
    assert report.ranks == (0,)
    assert report.culprits[0].place.microbatch == 0
    assert "rank 0 (host a, dp=0, pp=0) sent what does not fit in step 3: its instruction 1 of 20: SendAct(" in (
        report.words()
    )
    assert "(rank 1: MisfitError: 12 bytes, not 16)" in report.words()


def test_a_message_of_an_earlier_step_was_passed_over_by_its_receiver():
    one = "activation of stage 1, microbatch 0, float32 (4, 16)"
    text = (
        f"rank 1 received what it did not expect; expected: {one}, of step 3; what came is: {one}, of step 2 (rank 0)"
    )
    states = [
        state(0, index=6),
        state(1, Fate("error", 4, text), index=1, awaits=BlockingCall("receive", 0)),
        state(2),
        state(3),
    ]
    report = find_culprit(PLAN, states)
    assert report.ranks == (1,)
    (culprit,) = report.culprits
    assert (culprit.fault, culprit.step, culprit.place.index) == ("skipped", 2, 0)
    assert "passed over its instruction 0 of 20: RecvAct(" in report.words()
    other = text.replace("came is: activation of stage 1, microbatch 0", "came is: activation of stage 1, microbatch 1")
    states[1] = state(1, Fate("error", 4, other), index=1, awaits=BlockingCall("receive", 0))
    assert find_culprit(PLAN, states).ranks == (0,)


@pytest.mark.parametrize("fate", [Fate("signal", 6), Fate("exit", 134)])
def test_who_is_aborted_is_named_unless_the_sender_says_that_it_sent_too_much(fate):
    def find_with(sender, awaits, **sent):
        first = replace(state(0, index=sender), **sent)
        aborted = replace(state(1, fate, index=1, awaits=awaits), room=4096)
        return find_culprit(PLAN, [first, aborted, state(2), state(3)])

    for sender in (2, 6):
        report = find_with(sender, BlockingCall("receive", 0), sent=5000, sent_at=1)
        assert report.ranks == (0,)
        assert report.culprits[0].place.index == 1
        assert "rank 0 (host a, dp=0, pp=0) sent what does not fit in step 3: its instruction 1 of 20" in report.words()
        assert "(rank 1: it was aborted as 5000 bytes came, where it had room for 4096)" in report.words()
    for sent in ({}, {"sent": 4000, "sent_at": 1}, {"sent": 5000, "sent_at": 3}):
        for awaits in (BlockingCall("receive", 0), BlockingCall("nothing")):
            report = find_with(6, awaits, **sent)
            assert report.ranks == (1,)
            assert "it did so itself, or gloo did as more came than there was room for" in report.words()
            assert "messages of rank 0 were on the way" in report.words()
    report = find_with(0, BlockingCall("nothing"))
    assert report.ranks == (1,)
    assert "gloo" not in report.words(), "nothing was on its way"


@pytest.mark.parametrize("fate", [None, Fate("gone"), Fate("exit", 0)])
def test_who_leaves_its_loop_while_others_go_on_is_said_to_have_left(fate):
    left = RankState(1, "a", 13, "ended", 5, "train", None, 0.3, 0.3, fate, BlockingCall("nothing"), 2)
    waits = [state(rank, awaits=BlockingCall("collective", ranks=(0, 1, 2, 3)), index=None) for rank in (0, 2, 3)]
    report = find_culprit(PLAN, [waits[0], left, *waits[1:]])
    assert report.ranks == (1,)
    assert report.words().startswith(
        "rank 1 (host a, dp=0, pp=1) is at the end of its run after step 5: it left its loop, or closed its engine"
    )


def test_ranks_in_other_calls_are_told_apart_though_nobody_is_named():
    lost = Fate("error", 4, "StallError: a peer died")
    evaluates = replace(state(0, lost, phase="evaluate", index=2, awaits=BlockingCall("receive", 2)), program="forward")
    states = [evaluates, state(1, lost, awaits=BlockingCall("receive", 4)), state(2, lost), state(3, lost)]
    report = find_culprit(PLAN, states)
    assert report.ranks == ()
    assert (
        report.words().splitlines()[-1].startswith("rank 0 evaluates after step 3 while rank 1 is in step 3; all ranks")
    )
    trains = find_culprit(PLAN, [replace(states[0], phase="step"), *states[1:]])
    assert "same calls" not in trains.words()


@pytest.mark.parametrize("awaits", [BlockingCall("nothing"), BlockingCall("collective", ranks=(1, 3)), None])
def test_who_is_aborted_beside_partners_in_a_collective_is_doubted_for_these(awaits):
    plan = qs.compile("1f1b", mesh="tp=2,pp=2", microbatches=4)
    where = replace(state(1, Fate("signal", 6), index=1, awaits=awaits), room=4096)
    senders = [state(0, index=6), state(2, index=6)]
    report = find_culprit(plan, [senders[0], where, senders[1], state(3, index=1)])
    assert report.ranks == (1,)
    assert (
        report.words()
        .splitlines()[0]
        .endswith("gloo did as more came than there was room for: rank 3 may have begun another collective than it")
    )
    senders[0] = replace(senders[0], sent=5000, sent_at=7)
    report = find_culprit(plan, [senders[0], where, senders[1], state(3, index=1)])
    assert "messages of rank 0 were on the way" in report.words()


def test_an_error_of_a_ranks_own_is_its_own_though_it_waited_for_a_message():
    for text in ("TimeoutError: my own time limit", "RuntimeError: DataLoader worker (pid 7) is killed by signal"):
        fate = Fate("error", 1, text)
        report = find_culprit(
            PLAN, [state(0), state(1, fate, index=1, awaits=BlockingCall("receive", 0)), state(2), state(3)]
        )
        assert report.ranks == (1,)
        assert f"raised {text} (exit code 1), in step 3" in report.words()


def test_who_leaves_with_4_of_its_own_accord_is_no_victim():
    assert find(None, Fate("exit", 4, "by sys.exit"), None, None).ranks == (1,)
    assert find(None, Fate("exit", 4), None, None).ranks == ()


def test_what_ranks_and_files_say_is_fit_for_a_terminal():
    fate = Fate("error", 1, "ValueError: \udcff\x1b[31mred\nerror: rank 0 did it\x00\u202e")
    words = find_culprit(PLAN, [state(0), state(1, fate, host="h\n\x1b[2J"), state(2), state(3)]).words()
    assert "(host h \\x1b[2J, " in words
    assert "raised ValueError: \\udcff\\x1b[31mred error: rank 0 did it\\x00\\u202e (exit code 1)" in words
    report = find_culprit(PLAN, [state(0), state(1, Fate("error", 1, "x" * 10**6)), state(2), state(3)])
    assert len(report.words()) < 1000
    assert "… (cut) (exit code 1)" in report.words()
    assert StallReport.from_json(report.to_json()).words() == report.words()


def test_a_phase_that_others_wait_for():
    world = BlockingCall("collective", ranks=(0, 1, 2, 3))
    states = [state(rank, awaits=world, index=None, phase="data") for rank in range(3)]
    slow = state(3, awaits=BlockingCall("nothing"), index=None, phase="save", since_s=30.0)
    report = find_culprit(PLAN, [*states, slow])
    assert report.ranks == (3,)
    assert "has not gone on for 30.0 s saving a checkpoint after step 3" in report.words()


def test_all_load_slowly_and_nobody_waits():
    states = [state(rank, awaits=BlockingCall("nothing"), index=None, phase="data", since_s=60) for rank in range(4)]
    assert find_culprit(PLAN, states).ranks == ()


def test_who_has_gone_on_is_not_named():
    waits = state(0, awaits=BlockingCall("receive", 4))
    assert find_culprit(PLAN, [waits, state(1, awaits=BlockingCall("nothing"), index=1, since_s=0.3)]).ranks == ()
    assert find_culprit(PLAN, [waits, state(1, awaits=BlockingCall("nothing"), index=1, heard_s=4.0)]).ranks == ()
    assert find_culprit(PLAN, [waits, state(1, awaits=BlockingCall("nothing"), index=1)]).ranks == (1,)
    assert find_culprit(PLAN, [waits, state(1, awaits=BlockingCall("nothing"), index=1)], still_s=8).ranks == ()


def test_what_cannot_be_is_not_asked():
    odd = [
        state(0, awaits=BlockingCall("receive", 999)),
        state(1, index=10**6, awaits=BlockingCall("send", 0)),
        state(2, awaits=BlockingCall("collective", ranks=(7, 99))),
        state(3, awaits=BlockingCall("receive")),
        RankState(44, "z", 1, "step", 1, "train", 1, 1.0, 1.0),
    ]
    assert find_culprit(PLAN, odd).ranks == ()
    assert find_culprit(PLAN, []).ranks == ()
    other = [
        RankState(r, "a", 1, "evaluate", 3, "forward", 2, 9.0, 0.1, None, BlockingCall("receive", 0), 5)
        for r in range(4)
    ]
    assert find_culprit(PLAN, other).ranks == ()


def test_a_large_world_is_told_in_a_few_lines():
    plan = qs.compile("1f1b", mesh="dp=64,pp=4", microbatches=4)
    states = [
        RankState(
            r, "h", r, "step", 2, "train", None, 9.0, 0.1, None, BlockingCall("collective", ranks=tuple(range(256))), 2
        )
        for r in range(256)
    ]
    states[77] = RankState(77, "h", 77, "step", 2, "train", 3, 9.0, 0.1, Fate("signal", 9), BlockingCall("nothing"), 2)
    words = find_culprit(plan, states).words()
    assert words.startswith("rank 77 (host h, dp=19, pp=1) was killed by SIGKILL in step 2 at instruction 3 of")
    assert "247 other ranks" in words
    assert len(words.splitlines()) == 2
    assert len(words) < 1000
