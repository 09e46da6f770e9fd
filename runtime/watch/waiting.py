"""What a rank waits for, written where others can read it while it waits: one number in a cell.

    Cells, for a message     cell = 8 x its place in the program + 2 (receive) or 3 (send)     … wait …     cell = 1
    a group's collective     cell = 8 x the group's number + 4                                 … wait …     cell = 1

Before there are groups, WORLD_CODE says that all ranks are waited for.

The cell may be in memory that outlives the process; 0 there says nothing of waits. On accelerators a wait holds up a
stream, not the host: what this cell says is not to be shown there (`Transport.blocks_host`).
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from quintsched.stalls.states import Wait

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
