"""Sequence view of a plan's columns: programs, each a sequence of instruction objects.

plan.programs[1]          rank 1's program         a view: each instruction object is created on access
plan.programs[1][0]       RecvAct(stage=1, …)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, overload

from quintsched.ir.instruction_columns import Columns
from quintsched.ir.instruction_set import Instruction


class Program(Sequence[Instruction]):
    """One rank's program: a view of its rows, equal to any sequence of the same instructions."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: Columns, rank: int) -> None:
        self._columns, self._rows = columns, columns.rows_of(rank)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Instruction | tuple[Instruction, ...]:
        rows = self._rows[index]
        return tuple(self._columns.instructions(rows)) if isinstance(rows, range) else self._columns.instruction(rows)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._columns.instructions(self._rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))  # noqa: B905

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


class Programs(Sequence[Program]):
    """One program per pipeline rank: `programs[k]` is rank k's, a view of the columns."""

    __slots__ = ("columns",)

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @classmethod
    def from_programs(cls, programs: Iterable[Iterable[Instruction]]) -> Programs:
        """Build columns from programs; raises as `Columns.from_programs` does."""
        return programs if isinstance(programs, cls) else cls(Columns.from_programs(programs))

    def __len__(self) -> int:
        return self.columns.num_ranks

    @overload
    def __getitem__(self, index: SupportsIndex) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Program, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Program | tuple[Program, ...]:
        ranks = range(len(self))[index]
        return tuple(map(self._program, ranks)) if isinstance(ranks, range) else self._program(ranks)

    def _program(self, rank: int) -> Program:
        return Program(self.columns, rank)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Programs):
            return self.columns == other.columns
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))
