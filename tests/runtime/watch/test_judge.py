"""Verdicts and time limits, by a clock that tests move: who is to blame and when, exit codes and texts."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.watch.announce_verdict import Plans, RunVerdict, make_verdict, own_errors
from quintsched.runtime.watch.position_in_shared_memory import (
    NOTHING,
    START,
    UNKNOWN,
    WORLD_CODE,
    RankPosition,
    receive_code,
)
from quintsched.runtime.watch.stall_limits import FLOOR_S, Patience, PositionTracker
from quintsched.runtime.watch.verdict_timing import Judge, Member, Ruling
from quintsched.stalls.last_reported_rank_states import Fate

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


Event = Callable[[Run], object] | tuple[float, Ruling]
"""An event of a run, or seconds that pass and the ruling then."""


def ends(rank: int, fate: Fate) -> Event:
    return lambda run: run.members[rank].record_end(fate, run.now_s)


def says(rank: int, kind: Any, words: str = "of its own") -> Event:
    return lambda run: run.members[rank].fail(kind, words, 2, run.now_s)


def comes(*ranks: int, has_come: bool = True) -> Event:
    return lambda run: [setattr(run.members[rank], "has_come", has_come) for rank in ranks]


def falls_silent(run: Run) -> None:
    run.members[2].is_here, run.members[2].heard_s = False, run.now_s - 5


GO_ON, JUDGE, OVER = Ruling.GO_ON, Ruling.JUDGE, Ruling.OVER
LOST, BOOM = says(0, "stall", "connection closed by peer"), says(1, "own", "ValueError: boom")
TIMED_OUT = says(0, "stall", "timed out")

SCENARIOS: dict[str, tuple[Event, ...]] = {
    "a killed rank, when late words are in": (ends(1, KILLED), (0.2, GO_ON), (0.2, JUDGE)),
    "ranks that complain, at once where another has ended": (LOST, (0.5, GO_ON), ends(1, KILLED), (0.4, JUDGE)),
    "a complaint without a cause, after a while": (TIMED_OUT, (1.8, GO_ON), (0.5, JUDGE)),
    "a complaint, once a silent machine is cut off": (
        *(falls_silent, TIMED_OUT, (5, GO_ON)),
        *(ends(2, Fate("unreachable")), (0.4, JUDGE)),
    ),
    "a complaint, once a silent machine could have been": (falls_silent, TIMED_OUT, (9, GO_ON), (2, JUDGE)),
    "an error of its own, when its traceback is out": (BOOM, (1.0, GO_ON), ends(1, Fate("exit", 1)), (0.4, JUDGE)),
    "a rank that refuses alone": (says(2, "refusal"), ends(2, Fate("exit", 3)), (5, JUDGE)),
    "a rank that refuses before others have connected, when they have": (
        *(comes(0, 1, 2, has_come=False), says(2, "refusal"), (6, GO_ON)),
        *(comes(0, 1), (0.1, JUDGE)),
    ),
    "a refusal that others lost their peer by, at once": (says(2, "refusal"), LOST, (0.4, JUDGE)),
    "nobody where all refuse, who say so themselves": (
        *(says(0, "refusal"), (0.3, GO_ON), says(1, "refusal"), (0.3, GO_ON), says(2, "refusal")),
        *((0.3, OVER), ends(0, Fate("exit", 3)), (10, OVER)),
    ),
    "nobody where all are ended from outside": (*(ends(rank, Fate("signal", 15)) for rank in range(3)), (1, OVER)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_who_is_judged_and_when(name: str) -> None:
    run = Run()
    for event in SCENARIOS[name]:
        if isinstance(event, tuple):
            assert run.after(event[0]) is event[1]
        else:
            event(run)


@pytest.mark.parametrize("another_waits", [False, True])
def test_processes_that_come_to_their_end_in_set_up_are_no_failure_unless_another_waits(another_waits: bool) -> None:
    run = Run(START)
    for member in run.members[: 1 if another_waits else 3]:
        member.record_end(Fate("exit", 0), run.now_s)
    assert run.after(3) is (Ruling.GO_ON if another_waits else Ruling.OVER)
    run.members[1].place = START._replace(wait=WORLD_CODE)
    assert run.after(1.8) is (Ruling.JUDGE if another_waits else Ruling.OVER)


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


NOW_S = 70_000.0
PLANS = Plans()
PLANS.add_plan(0, qs.compile("1f1b", mesh="pp=2", microbatches=2).to_json().encode())


def members(place: RankPosition = STEP) -> list[Member]:
    """Return two ranks in the midst of a step."""
    return [Member(rank, "a", place=place, changed_s=NOW_S - 3, has_come=True, is_here=True) for rank in range(2)]


def judge(ranks: list[Member]) -> RunVerdict:
    return make_verdict(ranks, PLANS, None, NOW_S, still_s=1.0)


@pytest.mark.parametrize(("kind", "code", "again"), [("refusal", 3, True), ("refusal", 2, True), ("own", 1, False)])
def test_an_error_has_its_exit_code_on_whatever_rank_and_however_that_ends(kind, code, again):
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
def test_what_failed_in_code_that_communicates_is_its_own_where_no_other_rank_is_to_blame(others, own):
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


TICK_S = 0.1
WAITS = receive_code(1)
ALONE = ("setup", "data", "save", "idle")
"""Phases in which a rank waits for no other."""


def place(at: int = 0, step: int = 1, phase: str = "step", *, wait: int = NOTHING, entered: int = 1) -> RankPosition:
    return RankPosition(at, step, 0, phase, wait, step, entered)  # type: ignore[arg-type]


@dataclass
class PacedRun:
    """A run of two ranks whose places the test sets, watched as the hub watches it."""

    progress: PositionTracker
    now_s: float = 100.0
    step: int = 0
    places: dict[int, RankPosition] = field(default_factory=lambda: {0: START, 1: START})

    def stand(self, seconds: float) -> bool:
        """Let nobody move for so long; return whether that is a stall."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self.progress.look(self.now_s, self.places)
            if self.progress.is_stalled(list(self.places.values())):
                return True
        return False

    def go(self, rank: int, to: RankPosition) -> None:
        self.now_s += 0.01
        self.places = {**self.places, rank: to}
        self.progress.look(self.now_s, self.places)

    def make_step(self, pause_s: float = 0.0) -> bool:
        """Make a step of three instructions, with a pause in its midst; return whether that counts as a stall."""
        self.step += 1
        for at in range(3):
            for rank in (0, 1):
                self.go(rank, place(at, self.step, wait=WAITS if rank else NOTHING, entered=self.step))
        return pause_s > 0 and self.stand(pause_s)


def warm(patience: Patience | None = None) -> PacedRun:
    run = PacedRun(PositionTracker(patience or Patience()))
    for _ in range(5):
        run.make_step()
    return run


def test_hundreds_of_pauses_below_the_limit_end_nothing() -> None:
    drawn = random.Random(0)
    run = warm()
    assert not any(run.make_step(drawn.uniform(0.1, FLOOR_S - 0.2)) for _ in range(500))


def test_what_steps_usually_take_is_no_stall_and_one_pause_is_not_usual() -> None:
    run = warm()
    for _ in range(40):
        run.make_step(8)
    assert not run.make_step(4 * 8 - 1)
    run = warm()
    run.make_step(9)
    assert run.make_step(FLOOR_S + 1)


@pytest.mark.parametrize(
    ("patience", "ranks", "to", "least_s", "most_s"),
    [
        *((Patience(timeout_s=100), [0], {"phase": phase}, 95, 10) for phase in (*ALONE, "load")),
        *((Patience(timeout_s=30), [0, 1], {"phase": phase}, 300, None) for phase in ALONE),
        (None, [0, 1], {"wait": UNKNOWN}, 0, FLOOR_S + 1),
    ],
)
def test_what_is_no_step_may_take_as_long_as_a_wait_and_any_time_where_nobody_waits(
    patience: Patience | None, ranks: list[int], to: dict[str, Any], least_s: float, most_s: float | None
) -> None:
    run = warm(patience)
    for rank in ranks:
        run.go(rank, place(**to))
    assert not run.stand(least_s)
    assert most_s is None or run.stand(most_s)


@pytest.mark.parametrize(
    ("patience", "is_warm", "passes_s", "stalls_s"),
    [
        (Patience(), True, FLOOR_S - 0.2, FLOOR_S + 1),
        (Patience(stall_after=3), True, 2.8, 3.5),
        (Patience(stall_after=3), False, 50, None),
        (Patience(stall_after=3), False, 0, 70),
        (Patience(timeout_s=100), False, 60, 110),
        (Patience(timeout_s=1800, compiles=True), True, 290, 310),
    ],
    ids=["learnt", "given", "given, first step", "first step", "first step, of a wait", "compiled anew"],
)
def test_the_limit_of_a_pause(patience: Patience, is_warm: bool, passes_s: float, stalls_s: float | None) -> None:
    run = warm(patience) if is_warm else PacedRun(PositionTracker(patience))
    assert not (passes_s and run.make_step(passes_s))
    assert stalls_s is None or run.make_step(stalls_s)


def test_no_time_passes_while_the_hub_does_not_run() -> None:
    run = warm()
    run.now_s += 3600
    assert not run.stand(FLOOR_S - 1.5)
    assert run.stand(2)
