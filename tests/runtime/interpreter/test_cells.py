"""Values between two instructions: taken once, waited for by who takes them, released when they are answered."""

from __future__ import annotations

import torch

import quintsched as qs
from quintsched.ir.values import Value, ValueKind
from quintsched.runtime.interpreter.recorder import Recorder
from quintsched.runtime.interpreter.value_cells import ValueCells, Waits

ACTIVATION, GRADIENT = Value(ValueKind.OUTPUT, 0, 3), Value(ValueKind.OUTPUT_GRAD, 0, 3)


class Noted:
    """Work that counts how often it is waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_a_value_is_taken_once_and_its_receive_waited_for() -> None:
    cells, work, tensor = ValueCells(Waits()), Noted(), torch.ones(2)
    take = cells.taker(ACTIVATION, index=5)
    cells.cell_of(ACTIVATION).value, cells.cell_of(ACTIVATION).works = (tensor,), (work,)
    assert take() == (tensor,)
    assert take() == ()
    assert work.waits == 1


def test_a_gradient_that_comes_back_releases_the_activation_that_was_sent() -> None:
    cells, sent = ValueCells(Waits()), Noted()
    take = cells.taker(GRADIENT, index=5)
    cells.cell_of(ACTIVATION).sent = (sent,), (torch.ones(2),)
    cells.cell_of(GRADIENT).works = (Noted(),)
    take()
    assert cells.cell_of(ACTIVATION).sent is None
    assert sent.waits == 1


def test_a_gradient_of_the_same_rank_releases_nothing() -> None:
    cells, sent = ValueCells(Waits()), Noted()
    cells.cell_of(ACTIVATION).sent = (sent,), (torch.ones(2),)
    cells.taker(GRADIENT, index=5)()
    assert cells.cell_of(ACTIVATION).sent is not None
    assert sent.waits == 0


def test_what_was_sent_is_settled_before_the_next_step() -> None:
    cells, sent = ValueCells(Waits()), Noted()
    cells.sending.append(cells.cell_of(ACTIVATION))
    cells.cell_of(ACTIVATION).sent = (sent,), (torch.ones(2),)
    cells.release_sends()
    cells.release_sends()
    assert cells.cell_of(ACTIVATION).sent is None
    assert sent.waits == 1


def test_while_a_step_is_recorded_a_wait_counts_for_who_waits_and_for_the_receive() -> None:
    waits = Waits()
    recorder = Recorder(qs.compile("1f1b", mesh="pp=1", microbatches=1), 0, torch.device("cpu"), steps=[0])
    waits.recorder = recorder
    cells = ValueCells(waits)
    take = cells.taker(ACTIVATION, index=2)
    cells.cell_of(ACTIVATION).works, cells.cell_of(ACTIVATION).receive = (Noted(),), 1
    take()
    waiting = recorder._waits
    assert [index for index, _, _ in waiting] == [2, 1]
    assert waiting[0][1:] == waiting[1][1:]
    assert recorder._end[1] == waiting[0][2]
