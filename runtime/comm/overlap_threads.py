"""Two functions of a rank interleaved: while a collective of one is in flight, the other computes.

    forward    ██ compute ██┐exchange…┌██ compute ██┐exchange…┌██
                            ▼         ▲             ▼         ▲      one thread runs at a time: a side runs until it
    backward                └██ compute ██┐exchange…┘         └ …    would wait, then the other side runs

Blocks need no change: a `SidedGroup` replaces the groups that they communicate in. Before it waits for a collective it
lets the other side run, and each side has a communicator of its own. The order of turns is fixed beforehand
(`overlap_order`), never by arrival: all replicas issue their collectives in one order, and every wait is for an earlier
collective.

The sides are threads only because a backward runs inside autograd's engine, which cannot be left and re-entered. The
second thread is permanent, sleeps while nothing overlaps, and copies the context of the first: context variables,
autocast, torch modes. It does not see `threading.local` state of user code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from enum import IntEnum
from itertools import pairwise
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, overrides
from torch.utils import _python_dispatch as dispatch

from quintsched.errors import MisfitError

from .clocks import now_s
from .device import current_stream, is_accelerator, on_stream, timing_event
from .random_generators import SEEDED, generator_states, generators_lent, restore_generators
from .torch_modes import Modes
from .transport_interface import Group, ReduceOp, Work

BoundCall = Callable[[], None]


class Side(IntEnum):
    """The forward side and the backward side."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def other(self) -> Side:
        """The other side."""
        return Side(1 - self)


class Note:
    """Record of one side that ran alone: its waits inside the stage, and its times.

    Attributes:
        waits: descriptions of its waits, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.waits: list[str] = []
        self._stamps: list[Any] = []
        self.stamp()

    def stamp(self) -> None:
        """Record the time: at the beginning and the end, and before and after each wait."""
        self._stamps.append(timing_event(self._device) if is_accelerator(self._device) else now_s())

    def seconds(self) -> list[float]:
        """Return the seconds of the first computation, of the first wait, of the second computation, and so on."""
        if not is_accelerator(self._device):
            return [after - before for before, after in pairwise(self._stamps)]
        self._stamps[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._stamps)]


class Sides:
    """The two sides of a rank, and the state of their interleaving.

    Attributes:
        current: the side whose communicators are used; outside of `run` the forward's.
    """

    def __init__(self) -> None:
        self.current = Side.FORWARD
        self._note: Note | None = None
        self._turns: _SidesInTurns | None = None
        self._jobs: SimpleQueue[BoundCall | None] | None = None

    def record_side(self, side: Side, call: BoundCall, device: torch.device) -> Note:
        """Run one side alone, and return its record."""
        self.current, self._note = side, Note(device)
        try:
            call()
            self._note.stamp()
            return self._note
        finally:
            self.current, self._note = Side.FORWARD, None

    def run_sides(self, forward: BoundCall, backward: BoundCall, turns: Sequence[Side], device: torch.device) -> None:
        """Run both, in their turns; raises an error of either.

        Raises `MisfitError` where a side waits more or less often than the turns have it.
        """
        self._turns = both = _SidesInTurns(turns, device, self._enter)
        self.current, thread_state, variables = turns[0], _ThreadState(device), copy_context()
        self._second_thread().put(lambda: variables.run(both.run_side, Side.BACKWARD, backward, thread_state))
        try:
            both.run_side(Side.FORWARD, forward)
            both.ended.acquire()
        finally:
            self.current, self._turns = Side.FORWARD, None
        both.raise_failure()

    def wait_collective(self, work: Work, what: str) -> None:
        """Wait for a collective inside a stage; before that the other side runs, if it is its turn."""
        if self._turns is not None:
            self._turns.next(self.current)
        elif self._note is not None:
            self._note.waits.append(what)
            self._note.stamp()
            work.wait()
            self._note.stamp()
            return
        work.wait()

    def _enter(self, side: Side) -> None:
        self.current = side

    def _second_thread(self) -> SimpleQueue[BoundCall | None]:
        if self._jobs is None:
            self._jobs = jobs = SimpleQueue[BoundCall | None]()
            threading.Thread(target=_work, args=(jobs,), name="backwards that overlap", daemon=True).start()
            finalize(self, jobs.put, None)
        return self._jobs


def _work(jobs: SimpleQueue[BoundCall | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


class _SidesInTurns:
    """One run of two sides; `ended` is released when the backward has ended, `enter` is called with each next side."""

    def __init__(self, turns: Sequence[Side], device: torch.device, enter: Callable[[Side], None]) -> None:
        self._turns, self._device, self._enter = turns, device, enter
        self._place = 0
        self._baton = (threading.Lock(), threading.Lock())
        self._generators = [generator_states(device)] * 2
        self._failures: list[BaseException] = []
        self._has_ended = [False, False]
        self.ended = threading.Lock()
        self.ended.acquire()
        for side in Side:
            if side is not turns[0]:
                self._baton[side].acquire()

    def run_side(self, side: Side, call: BoundCall, state: AbstractContextManager[object] | None = None) -> None:
        """Run one side, on its thread, from its first turn to its last."""
        try:
            with state or ExitStack():
                self._baton[side].acquire()
                if not self._failures:
                    call()
        except BaseException as failure:
            self._failures.append(failure)
        self._end(side)
        if side is Side.BACKWARD:
            self.ended.release()

    def next(self, side: Side) -> None:
        """End a turn of a side that continues later."""
        self._place += 1
        following = self._turns[self._place] if self._place < len(self._turns) else None
        if following is None or self._has_ended[following]:
            raise _other_than_noted(side, "more")
        if following is not side:
            with generators_lent() if threading.get_ident() in SEEDED else nullcontext():
                self._hand_over(side, following)
                self._baton[side].acquire()
            if self._failures:
                raise _OtherSideFailed

    def _end(self, side: Side) -> None:
        """End the last turn of a side."""
        self._has_ended[side] = True
        if self._has_ended[side.other]:
            self._generators[side] = generator_states(self._device)
            return
        self._place += 1
        left = self._turns[self._place :]
        if not self._failures and side in left:
            self._failures.append(_other_than_noted(side, "less"))
        if not self._failures and not left:
            self._failures.append(_other_than_noted(side.other, "more"))
        self._hand_over(side, side.other)

    def _hand_over(self, side: Side, following: Side) -> None:
        """Let the other side run, with random generators in the state it left: a backward may rerun a forward."""
        self._generators[side] = generator_states(self._device)
        restore_generators(self._device, self._generators[following])
        self._enter(following)
        self._baton[following].release()

    def raise_failure(self) -> None:
        """Raise the first error, of either side."""
        if self._failures:
            raise self._failures[0]
        restore_generators(self._device, self._generators[Side.FORWARD])


class _OtherSideFailed(BaseException):
    """Unwinds a side after the other side has failed."""


def _other_than_noted(side: Side, how: str) -> MisfitError:
    return MisfitError(
        f"a {side.name.lower()} that overlaps waits for others {how} often than in the second step, by which the order "
        "was settled; how often a block communicates must not depend on its data: compile the plan without overlap"
    )


class _ThreadState:
    """Execution context of the calling thread, to be entered on another thread.

    It comprises the stream, grad mode, autocast, function modes and dispatch modes (a default device is one).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device) if is_accelerator(device) else None
        self._modes = Modes.now()
        self._function_modes = overrides._get_current_function_mode_stack()
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(on_stream(self._stream))
        self._entered.enter_context(self._modes.entered())
        for function_mode in self._function_modes:
            overrides._push_mode(function_mode)
            self._entered.callback(overrides._pop_mode)
        for dispatch_mode in self._dispatch_modes:
            dispatch._push_mode(dispatch_mode)
            self._entered.callback(dispatch._pop_mode)

    def __exit__(self, *_: object) -> None:
        self._entered.close()


class _SidedWork:
    """Work of a side; waiting for it lets the other side run first."""

    __slots__ = ("_sides", "_what", "_work")

    def __init__(self, work: Work, sides: Sides, what: str) -> None:
        self._work, self._sides, self._what = work, sides, what

    def wait(self) -> None:
        self._sides.wait_collective(self._work, self._what)


class SidedGroup(Group):
    """A group for blocks that overlap: the same ranks of an axis twice, with a communicator for each side."""

    def __init__(self, groups: tuple[Group, Group], axis: str, sides: Sides) -> None:
        super().__init__(groups[0].ranks, groups[0].index, groups[0].device)
        self._groups, self._axis, self._sides = groups, axis, sides

    def beside(self, work: Work) -> Work:
        """Return the work of a message; waiting for it lets the other side run first."""
        return self._sided(self._groups[0].beside(work), "message")

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._sided(self._group._all_reduce(tensor, op), "all_reduce")

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._sided(self._group._all_gather(output, tensor), "all_gather")

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._sided(self._group._reduce_scatter(output, tensor), "reduce_scatter")

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work:
        return self._sided(self._group._all_to_all(output, tensor, received, sent), "all_to_all")

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._sided(self._group._broadcast(tensor, source), "broadcast")

    @property
    def _group(self) -> Group:
        return self._groups[self._sides.current]

    def _sided(self, work: Work, what: str) -> Work:
        return _SidedWork(work, self._sides, f"{what} over {self._axis}")
