"""Two sides of a rank: what goes wrong on one of them, and what they see and leave behind."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import quintsched as qs
from quintsched.runtime.comm import SelfGroup
from quintsched.runtime.comm.overlap_order import Overlaps
from quintsched.runtime.comm.overlap_threads import Side, Sides
from quintsched.runtime.comm.transport_interface import DoneWork

CPU = torch.device("cpu")
ALONE = SelfGroup(0, CPU)
F, B = Side.FORWARD, Side.BACKWARD


class Talk:
    """A side that waits so many times; `said` is in the order in which things happen."""

    def __init__(self, sides: Sides, said: list[str]) -> None:
        self.sides, self.said = sides, said

    def side(self, name: str, waits: int, then: Callable[[], Any] = lambda: None) -> Callable[[], None]:
        def run() -> None:
            for number in range(waits):
                self.said.append(f"{name}{number}")
                self.sides.wait_collective(DoneWork(), "all_reduce over tp")
            self.said.append(f"{name}{waits}")
            then()

        return run


@pytest.fixture
def talk() -> Talk:
    return Talk(Sides(), [])


@pytest.mark.parametrize(("guilty", "first", "waits"), [("f", F, 0), ("f", B, 1), ("b", F, 2), ("b", B, 0)])
def test_what_fails_on_one_side_ends_both_and_the_next_pair_runs(talk, guilty, first, waits):
    turns = (first, first.other, first, first.other, first, first.other)
    calls = {name: talk.side(name, 2) for name in "fb"}
    calls[guilty] = talk.side(guilty, waits, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        talk.sides.run_sides(calls["f"], calls["b"], turns, CPU)
    talk.said.clear()
    talk.sides.run_sides(talk.side("f", 2), talk.side("b", 2), turns, CPU)
    assert len(talk.said) == 6


def test_the_second_side_sees_context_variables_and_modes(talk: Talk) -> None:
    variable, found, flops = ContextVar("variable", default=0), list[tuple[Any, ...]](), FlopCounterMode(display=False)

    def compute() -> None:
        modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
        found.append((variable.get(), torch.ones(2, 2).device.type, *modes))
        torch.zeros(3, 3) @ torch.zeros(3, 3)

    variable.set(7)
    with torch.device("meta"), flops, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        talk.sides.run_sides(compute, compute, (F, B), CPU)
    talk.sides.run_sides(compute, compute, (B, F), CPU)
    assert found == [(7, "meta", True, False)] * 2 + [(7, "cpu", False, True)] * 2
    assert flops.get_total_flops() == 2 * 2 * 27


def test_microbatches_that_exchange_differently_are_refused(talk: Talk) -> None:
    overlaps, counts = Overlaps(talk.sides, CPU), iter([1, 1, 2])
    pair = overlaps.pair(talk.side("f", 1), lambda: talk.side("b", next(counts))(), (0, 3))
    pair()
    assert not overlaps.end_step(ALONE)
    assert not overlaps.end_step(ALONE), "a step in which too few samples left the pair out"
    pair()
    pair()
    with pytest.raises(qs.MisfitError, match=r"stage 3: its backwards exchange 1 to 2 times from one microbatch"):
        overlaps.end_step(ALONE)


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 3)])
def test_a_side_that_waits_more_or_less_often_than_was_noted_is_refused(talk, forward, backward):
    with pytest.raises(qs.MisfitError, match=r"overlaps waits for others (more|less) often than in the second step"):
        talk.sides.run_sides(talk.side("f", forward), talk.side("b", backward), (F, B, F, B, F, B), CPU)
