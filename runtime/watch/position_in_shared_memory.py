"""Cell: the position of a rank in its program, a few numbers in memory that outlives the process.

    rank       cell.numbers[INDEX] = 17      one store into a page of an anonymous file (memfd)
    hub        maps /proc/PID/fd/N once: the last store is readable even after a kill or a stop

Where there is no such file, or it cannot be opened (another machine, another system), the cell is plain memory, and
the rank's watcher sends samples of it.

The wait of a rank, published while it waits, is one number in a cell:

    Cells, for a message     cell = 8 x its index in the program + 2 (receive) or 3 (send)     … wait …     cell = 1
    a group's collective     cell = 8 x the group's number + 4                                 … wait …     cell = 1

WORLD_CODE stands for a wait for all ranks, before there are groups.

The cell may be in memory that outlives the process; 0 there means unknown. On accelerators a wait blocks a stream, not
the host: there waits in this cell are not to be shown (`Transport.blocks_host`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import MutableSequence, Sequence
from contextlib import suppress
from typing import NamedTuple, cast, get_args

from quintsched.stalls.last_reported_rank_states import BlockingCall, GivenBatch, Phase

UNKNOWN, NOTHING, _RECEIVE, _SEND, _COLLECTIVE = range(5)
_KINDS = 8


class WaitCell:
    """One number of `memory`, at place `at`: the code of a rank's wait. `call`: its engine's method called last."""

    __slots__ = ("at", "call", "memory")

    def __init__(self) -> None:
        self.memory: MutableSequence[int] = [NOTHING]
        self.at = self.call = 0

    def move(self, memory: MutableSequence[int], at: int) -> None:
        """Use other memory from now on, and copy the number there."""
        memory[at] = self.memory[self.at]
        self.memory, self.at = memory, at


def receive_code(index: int) -> int:
    """Return the code of a wait for the receive at an index of the program."""
    return _KINDS * index + _RECEIVE


def send_code(index: int) -> int:
    """Return the code of a wait for completion of the send at an index of the program."""
    return _KINDS * index + _SEND


def collective_code(group: int) -> int:
    """Return the code of a wait for a collective of a group, by the group's number on its transport."""
    return _KINDS * group + _COLLECTIVE


WORLD_CODE = collective_code(2**40)
"""Code of a wait for all ranks, as in set-up."""


def wait_of(code: int, groups: Sequence[tuple[int, ...]]) -> BlockingCall | None:
    """Return the wait for a code; `groups` are the ranks of a transport's groups. None: invalid or unknown."""
    number, kind = divmod(code, _KINDS)
    if kind == _RECEIVE:
        return BlockingCall("receive", index=number)
    if kind == _SEND:
        return BlockingCall("send", index=number)
    if kind == _COLLECTIVE:
        return BlockingCall("collective", ranks=groups[number]) if number < len(groups) else None
    return BlockingCall("nothing") if kind == NOTHING else None


PHASES: tuple[Phase, ...] = get_args(Phase)
INDEX, STEP, PROGRAM, PHASE, WAIT, RUN, ENTERED, RANK, PID, SENT, SENT_AT, ROOM, GIVEN = range(13)
"""Indices of a cell's numbers; the last ones are those of `GivenBatch`."""
NUMBERS = GIVEN + 4
CELL_BYTES = 8 * NUMBERS
NOWHERE = -1
"""Value for no instruction, no step, no program."""


class RankPosition(NamedTuple):
    """Position of a rank, as read from its cell: `at` (instruction), step and program are `NOWHERE` outside of any.

    `wait` is a code as above, `run` the number of programs it has begun, `entered` that of phases. `sent` is the size
    in bytes of the last message that was longer than those before, sent by the instruction `sent_at`; `room` that of
    the longest message it can receive. `given` is the size of the rank's batch, as in `GivenBatch`.
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
    given: GivenBatch = GivenBatch()


START = RankPosition(NOWHERE, NOWHERE, NOWHERE, "setup", NOTHING, 0, 0)
"""Position of a rank before its first store."""


class PositionCell:
    """This rank's cell.

    Attributes:
        numbers: the memory to store into, by the indices INDEX, STEP, …
        file: the file descriptor; None where there is no file.
    """

    def __init__(self, rank: int, *, shared: bool) -> None:
        self.file, memory = _shared_memory() if shared else (None, bytearray(CELL_BYTES))
        self._view = memoryview(memory).cast("q")
        self.numbers = cast("MutableSequence[int]", self._view)
        self.numbers[RANK], self.numbers[PID] = rank, os.getpid()
        self.numbers[INDEX] = self.numbers[STEP] = self.numbers[PROGRAM] = NOWHERE
        self.numbers[SENT_AT] = NOWHERE
        self.numbers[WAIT] = NOTHING

    def read_position(self) -> RankPosition:
        """Return the position of the rank."""
        return place_of(self._view.tolist())

    def close(self) -> None:
        """Close the file; later stores are still visible to a process that has mapped it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class CellReader:
    """A cell of another process, mapped read-only."""

    def __init__(self, pid: int, file: int, rank: int) -> None:
        """Map the cell of `rank`; raises `OSError` where it cannot be opened, or belongs to another rank."""
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(opened, CELL_BYTES, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(str(error)) from error
        finally:
            os.close(opened)
        numbers = self._numbers()
        if (numbers[RANK], numbers[PID]) != (rank, pid):
            self.close()
            raise OSError(f"process {pid} has no cell of rank {rank} there")

    def read_position(self) -> RankPosition:
        """Return the current or last position of the rank."""
        return place_of(self._numbers())

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()

    def _numbers(self) -> list[int]:
        with memoryview(self._memory) as view, view[:CELL_BYTES].cast("q") as numbers:
            return numbers.tolist()


def place_of(numbers: list[int]) -> RankPosition:
    """Return the position from a cell's numbers; raises `ValueError` for invalid ones."""
    if len(numbers) < NUMBERS or not 0 <= numbers[PHASE] < len(PHASES):
        raise ValueError("no numbers of a cell")
    at, step, program, phase, wait, run, entered = numbers[:RANK]
    sent, sent_at, room = numbers[SENT:GIVEN]
    given = GivenBatch(*numbers[GIVEN:NUMBERS])
    return RankPosition(at, step, program, PHASES[phase], wait, run, entered, sent, sent_at, room, given)


def _shared_memory() -> tuple[int | None, mmap.mmap | bytearray]:
    with suppress(AttributeError, OSError):
        file = os.memfd_create("quintsched", os.MFD_CLOEXEC)
        os.ftruncate(file, mmap.PAGESIZE)
        return file, mmap.mmap(file, mmap.PAGESIZE)
    return None, bytearray(CELL_BYTES)
