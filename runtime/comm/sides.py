"""Two functions of a rank side by side: while what one exchanges is on its way, the other computes.

    forward    ██ compute ██┐exchange…┌██ compute ██┐exchange…┌██
                            ▼         ▲             ▼         ▲      one thread runs at a time: a side goes on until
    backward                └██ compute ██┐exchange…┘         └ …    it would wait, then it is the other's turn

Blocks need not know: a `SidedGroup` takes the place of the groups that they communicate in. Before it waits for a
collective it lets the other side go on, and each side has a communicator of its own. Whose turn it is after each wait
is settled beforehand (`interleaving`), never by what arrives first: all replicas issue their collectives in one order,
and every wait points backwards.

The sides are threads only because a backward runs inside autograd's engine, which cannot be left and entered again. The
second one is the rank's for good, sleeps while nothing overlaps, and computes under what the first one does: context
variables, autocast, modes of torch. What a user's code keeps in a `threading.local` it does not see.
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

from .base import Group, ReduceOp, Work
from .clock import now_s
from .device import (
    SEEDED,
    current_stream,
    generator_states,
    generators_lent,
    is_accelerator,
    on_stream,
    restore_generators,
    timing_event,
)
from .modes import Modes

Call = Callable[[], None]


class Side(IntEnum):
    """One of the two."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def other(self) -> Side:
        """The other one."""
        return Side(1 - self)


class Note:
    """What one side did when it ran alone: whom it waited for inside its stage, and how long it did what.

    Attributes:
        waits: what it waited for, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.waits: list[str] = []
        self._stamps: list[Any] = []
        self.stamp()

    def stamp(self) -> None:
        """Note the time: at the beginning and the end, and before and after each wait."""
        self._stamps.append(timing_event(self._device) if is_accelerator(self._device) else now_s())

    def seconds(self) -> list[float]:
        """Return the time of the first computation, of the first wait, of the second computation, and so on."""
        if not is_accelerator(self._device):
            return [after - before for before, after in pairwise(self._stamps)]
        self._stamps[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._stamps)]


class Sides:
    """What a rank knows of its two sides.

    Attributes:
        current: whose communicators are used; outside of `run` the forward's.
    """

    def __init__(self) -> None:
        self.current = Side.FORWARD
        self._note: Note | None = None
        self._turns: _Turns | None = None
        self._jobs: SimpleQueue[Call | None] | None = None

    def note(self, side: Side, call: Call, device: torch.device) -> Note:
        """Run one side alone, and return what it did."""
        self.current, self._note = side, Note(device)
        try:
            call()
            self._note.stamp()
            return self._note
        finally:
            self.current, self._note = Side.FORWARD, None

    def run(self, forward: Call, backward: Call, turns: Sequence[Side], device: torch.device) -> None:
        """Run both, each in its turns; raises what one of them raises.

        Raises `MisfitError` where a side waits more or less often than the turns say.
        """
        self._turns = both = _Turns(turns, device, self._enter)
        self.current, thread_state, variables = turns[0], _ThreadState(device), copy_context()
        self._second_thread().put(lambda: variables.run(both.run, Side.BACKWARD, backward, thread_state))
        try:
            both.run(Side.FORWARD, forward)
            both.ended.acquire()
        finally:
            self.current, self._turns = Side.FORWARD, None
        both.raise_failure()

    def wait(self, work: Work, what: str) -> None:
        """Wait for what is under way inside a stage; before that the other side goes on, if it is its turn."""
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

    def _second_thread(self) -> SimpleQueue[Call | None]:
        if self._jobs is None:
            self._jobs = jobs = SimpleQueue[Call | None]()
            threading.Thread(target=_work, args=(jobs,), name="backwards that overlap", daemon=True).start()
            finalize(self, jobs.put, None)
        return self._jobs


def _work(jobs: SimpleQueue[Call | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


class _Turns:
    """One run of two sides; `ended` is free when the backward has ended, `enter` is told whose turn it is."""

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

    def run(self, side: Side, call: Call, state: AbstractContextManager[object] | None = None) -> None:
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
        """End a turn of a side that goes on later."""
        self._place += 1
        following = self._turns[self._place] if self._place < len(self._turns) else None
        if following is None or self._has_ended[following]:
            raise _more_than_noted(side)
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
            self._failures.append(_less_than_noted(side))
        if not self._failures and not left:
            self._failures.append(_more_than_noted(side.other))
        self._hand_over(side, side.other)

    def _hand_over(self, side: Side, following: Side) -> None:
        """Let the other side go on, with the random generators as it left them: a backward may rerun a forward."""
        self._generators[side] = generator_states(self._device)
        restore_generators(self._device, self._generators[following])
        self._enter(following)
        self._baton[following].release()

    def raise_failure(self) -> None:
        """Raise what went wrong first, on either side."""
        if self._failures:
            raise self._failures[0]
        restore_generators(self._device, self._generators[Side.FORWARD])


class _OtherSideFailed(BaseException):
    """Unwinds a side whose other side has failed."""


def _more_than_noted(side: Side) -> MisfitError:
    return _other_than_noted(side, "more")


def _less_than_noted(side: Side) -> MisfitError:
    return _other_than_noted(side, "less")


def _other_than_noted(side: Side, how: str) -> MisfitError:
    return MisfitError(
        f"a {side.name.lower()} that overlaps waits for others {how} often than in the second step, by which the order "
        "was settled; how often a block communicates must not depend on its data: compile the plan without overlap"
    )


class _ThreadState:
    """What the calling thread computes under, taken over by another thread in a `with`.

    That is its stream, grad mode, autocast, and modes over functions and operators (a default device is one).
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
    """Work of a side; before it is waited for, the other side goes on."""

    __slots__ = ("_sides", "_what", "_work")

    def __init__(self, work: Work, sides: Sides, what: str) -> None:
        self._work, self._sides, self._what = work, sides, what

    def wait(self) -> None:
        self._sides.wait(self._work, self._what)


class SidedGroup(Group):
    """A group that blocks communicate in: the same ranks of an axis twice, with a communicator for each side."""

    def __init__(self, groups: tuple[Group, Group], axis: str, sides: Sides) -> None:
        super().__init__(groups[0].ranks, groups[0].index, groups[0].device)
        self._groups, self._axis, self._sides = groups, axis, sides

    def beside(self, work: Work) -> Work:
        """Return the work of a message, before whose wait the other side goes on."""
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
