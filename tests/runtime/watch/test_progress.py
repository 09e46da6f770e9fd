"""Time limit for a run that stands still: by a clock that the tests move."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from quintsched.runtime.watch.position_in_shared_memory import NOTHING, START, UNKNOWN, RankPosition, receive_code
from quintsched.runtime.watch.stall_limits import FLOOR_S, Patience, PositionTracker

TICK_S = 0.1
WAITS = receive_code(1)
ALONE = ("setup", "data", "save", "idle")
"""Phases in which a rank waits for no other."""


def place(at: int = 0, step: int = 1, phase: str = "step", *, wait: int = NOTHING, entered: int = 1) -> RankPosition:
    return RankPosition(at, step, 0, phase, wait, step, entered)  # type: ignore[arg-type]


@dataclass
class Run:
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


def warm(patience: Patience | None = None) -> Run:
    run = Run(PositionTracker(patience or Patience()))
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
    run = warm(patience) if is_warm else Run(PositionTracker(patience))
    assert not (passes_s and run.make_step(passes_s))
    assert stalls_s is None or run.make_step(stalls_s)


def test_no_time_passes_while_the_hub_does_not_run() -> None:
    run = warm()
    run.now_s += 3600
    assert not run.stand(FLOOR_S - 1.5)
    assert run.stand(2)
