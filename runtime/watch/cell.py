"""Where a rank is, in memory that outlives it: a few numbers, each written by one store, read by who maps them.

    rank       cell.numbers[INDEX] = 17      one store into a page of a nameless file (memfd)
    hub        reads /proc/PID/fd/N, mapped once: what was stored last is there also after a kill or a stop

Where there is no such file, or no such way to it (another machine, another system), the cell is plain memory, and
the rank's watcher sends samples of it.

What a rank waits for, written where others can read it while it waits: one number in a cell.

    Cells, for a message     cell = 8 x its place in the program + 2 (receive) or 3 (send)     … wait …     cell = 1
    a group's collective     cell = 8 x the group's number + 4                                 … wait …     cell = 1

Before there are groups, WORLD_CODE says that all ranks are waited for.

The cell may be in memory that outlives the process; 0 there says nothing of waits. On accelerators a wait holds up a
stream, not the host: what this cell says is not to be shown there (`Transport.blocks_host`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import MutableSequence, Sequence
from contextlib import suppress
from typing import NamedTuple, cast, get_args

from quintsched.stalls.states import Given, Phase, Wait

UNKNOWN, NOTHING, _RECEIVE, _SEND, _COLLECTIVE = range(5)
_KINDS = 8


class WaitCell:
    """One number of `memory`, at place `at`, that says what a rank waits for."""

    __slots__ = ("at", "memory")

    def __init__(self) -> None:
        self.memory: MutableSequence[int] = [NOTHING]
        self.at = 0

    def move(self, memory: MutableSequence[int], at: int) -> None:
        """Be in other memory from now on."""
        memory[at] = self.memory[self.at]
        self.memory, self.at = memory, at


def receive_code(index: int) -> int:
    """Return what says that the receive at a place of the program is waited for."""
    return _KINDS * index + _RECEIVE


def send_code(index: int) -> int:
    """Return what says that the receipt of the send at a place of the program is waited for."""
    return _KINDS * index + _SEND


def collective_code(group: int) -> int:
    """Return what says that a collective of a group is waited for, by the group's number on its transport."""
    return _KINDS * group + _COLLECTIVE


WORLD_CODE = collective_code(2**40)
"""What says that all ranks are waited for, as in set-up."""


def wait_of(code: int, groups: Sequence[tuple[int, ...]]) -> Wait | None:
    """Return what a cell's number says; `groups` are the ranks of a transport's groups. None for what says nothing."""
    number, kind = divmod(code, _KINDS)
    if kind == _RECEIVE:
        return Wait("receive", index=number)
    if kind == _SEND:
        return Wait("send", index=number)
    if kind == _COLLECTIVE:
        return Wait("collective", ranks=groups[number]) if number < len(groups) else None
    return Wait("nothing") if kind == NOTHING else None


PHASES: tuple[Phase, ...] = get_args(Phase)
INDEX, STEP, PROGRAM, PHASE, WAIT, RUN, ENTERED, RANK, PID, SENT, SENT_AT, ROOM, GIVEN = range(13)
"""What each number of a cell is; from the last on they are those of `Given`."""
NUMBERS = GIVEN + 4
BYTES = 8 * NUMBERS
NOWHERE = -1
"""No instruction, no step, no program."""


class Place(NamedTuple):
    """Where a rank is, as its cell says: instruction (`at`), step and program are `NOWHERE` where there are none.

    `wait` is a number as above, `run` says how many programs it has begun, `entered` how many phases.
    `sent` are the bytes of its last message that was longer than those before it by the instruction `sent_at`, `room`
    those of the longest that it has room for. The others say what the rank was given, as `Given` has it.
    """

    at: int
    step: int
    program: int
    phase: Phase
    wait: int
    run: int
    entered: int
    sent: int = 0
    sent_at: int = NOWHERE
    room: int = 0
    given: Given = Given()


START = Place(NOWHERE, NOWHERE, NOWHERE, "setup", NOTHING, 0, 0)
"""Where a rank is that has said nothing."""


class Cell:
    """This rank's cell.

    Attributes:
        numbers: to be stored into, each as INDEX, STEP, … say.
        file: the number of its file; None where it has none.
    """

    def __init__(self, rank: int, *, shared: bool) -> None:
        self.file, memory = _shared_memory() if shared else (None, bytearray(BYTES))
        self._view = memoryview(memory).cast("q")
        self.numbers = cast("MutableSequence[int]", self._view)
        self.numbers[RANK], self.numbers[PID] = rank, os.getpid()
        self.numbers[INDEX] = self.numbers[STEP] = self.numbers[PROGRAM] = NOWHERE
        self.numbers[SENT_AT] = NOWHERE
        self.numbers[WAIT] = NOTHING

    def read(self) -> Place:
        """Return where the rank is."""
        return place_of(self._view.tolist())

    def close(self) -> None:
        """Close the file; what is stored from now on is seen by who has mapped it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class CellReader:
    """Another process's cell, mapped."""

    def __init__(self, pid: int, file: int, rank: int) -> None:
        """Map the cell of `rank`; raises `OSError` where there is no way to it, or it is another's."""
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(opened, BYTES, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(str(error)) from error
        finally:
            os.close(opened)
        numbers = self._numbers()
        if (numbers[RANK], numbers[PID]) != (rank, pid):
            self.close()
            raise OSError(f"process {pid} has no cell of rank {rank} there")

    def read(self) -> Place:
        """Return where the rank is, or was last."""
        return place_of(self._numbers())

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _numbers(self) -> list[int]:
        with memoryview(self._memory) as view, view[:BYTES].cast("q") as numbers:
            return numbers.tolist()


def place_of(numbers: list[int]) -> Place:
    """Return the place that a cell's numbers say; raises `ValueError` for what are no such numbers."""
    if len(numbers) < NUMBERS or not 0 <= numbers[PHASE] < len(PHASES):
        raise ValueError("no numbers of a cell")
    at, step, program, phase, wait, run, entered = numbers[:RANK]
    sent, sent_at, room = numbers[SENT:GIVEN]
    given = Given(*numbers[GIVEN:NUMBERS])
    return Place(at, step, program, PHASES[phase], wait, run, entered, sent, sent_at, room, given)


def _shared_memory() -> tuple[int | None, mmap.mmap | bytearray]:
    with suppress(AttributeError, OSError):
        file = os.memfd_create("quintsched", os.MFD_CLOEXEC)
        os.ftruncate(file, mmap.PAGESIZE)
        return file, mmap.mmap(file, mmap.PAGESIZE)
    return None, bytearray(BYTES)
