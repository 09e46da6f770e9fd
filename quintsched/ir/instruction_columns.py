"""Storage of a plan's instructions as a structure of arrays: one row per instruction, rank after rank.

    row          0    1        2    …        rank 0's program, then rank 1's, …
    op           Fwd  SendAct  Bwd  …        index into `instructions.ALL`
    stage        0    0        0    …        one column per field that any instruction of the plan has;
    microbatch   0    0        0    …        -1 where an instruction has no such field
    peer         -1   1        -1   …
    stages       -1   -1       -1   …        other values than numbers are in `table`; the column holds their index

`quintsched.ir.rank_programs` presents them as sequences of instruction objects, each created on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.errors import UnsoundError
from quintsched.ir.instruction_set import ALL, COMPUTING, Bwd, Fwd, Instruction, Overlap

Ints: TypeAlias = npt.NDArray[np.int64]
Codes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]
Amounts: TypeAlias = npt.NDArray[np.float64]

ABSENT = -1
LARGEST = 2**31 - 1
"""Largest number in an instruction; the smallest is its negative."""

CODES = {kind: code for code, kind in enumerate(ALL)}
"""Code of each class of instruction in `op`."""

FIELDS: dict[type[Instruction], tuple[str, ...]] = {kind: tuple(field.name for field in fields(kind)) for kind in ALL}
"""The fields of each class of instruction, in order."""

NUMBERS = frozenset(field.name for kind in ALL for field in fields(kind) if str(field.type) == "int")
"""Fields that hold one integer; the values of all others are in the table."""

ENTRIES: dict[str, type | None] = {
    field.name: {"str": None, "tuple[int, ...]": int, "tuple[int, int]": int, "tuple[str, ...]": str}[str(field.type)]
    for kind in ALL
    for field in fields(kind)
    if field.name not in NUMBERS
}
"""Type of a table field's tuple entries; None if the field is a name."""

PAIRS = frozenset(field.name for kind in ALL for field in fields(kind) if str(field.type) == "tuple[int, int]")
"""Table fields that hold a (stage, microbatch) pair."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Arrays of a plan: `first[k]` is the row of rank k's first instruction, all others have one entry per row.

    All arrays are read-only, so results that a plan caches stay valid. `columns` holds the fields by name; a field that
    no instruction of the plan has may be missing. `table` holds values that are not numbers: axes, stages, names.
    """

    first: Ints
    op: Codes
    columns: Mapping[str, Ints]
    table: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", _read_only(self.first))
        object.__setattr__(self, "op", _read_only(self.op))
        kept = {name: _read_only(column) for name, column in self.columns.items()}
        object.__setattr__(self, "columns", MappingProxyType(kept))

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.first, self.op, dict(self.columns), self.table)

    @classmethod
    def from_programs(cls, programs: Iterable[Iterable[Instruction]]) -> Columns:
        """Build the arrays from programs; O(instructions).

        Raises `UnsoundError` for an object that is no instruction, or a field of the wrong type: numbers must be
        integers that fit into 32 bits (numpy's too, but no bool).
        """
        lists = [list(program) for program in programs]
        first = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        rows = list(chain.from_iterable(lists))
        try:
            op = np.array([CODES[type(i)] for i in rows], dtype=np.uint8)
        except KeyError:
            row = next(row for row, i in enumerate(rows) if type(i) not in CODES)
            raise UnsoundError(f"{_place(first, row)}: {rows[row]!r} is no instruction") from None
        found, table = dict[str, Ints](), dict[Any, int]()
        for code in np.unique(op).tolist():
            where = np.flatnonzero(op == code)
            mine = [rows[row] for row in where.tolist()] if len(where) < len(rows) else rows
            for name in FIELDS[ALL[code]]:
                values = list(map(attrgetter(name), mine))
                column = found.setdefault(name, np.full(len(rows), ABSENT))
                try:
                    column[where] = _numbers(values) if name in NUMBERS else _interned(name, values, table)
                except _WrongValue as wrong:
                    row = int(where[wrong.at])
                    raise UnsoundError(f"{_place(first, row)}, {rows[row]}: {name} {wrong}") from None
        return cls(first, op, found, tuple(table))

    @classmethod
    def make(cls, kind: type[Instruction], rank: Ints, num_ranks: int, **values: Any) -> Columns:
        """Return rows of one class, ordered by rank.

        `values` are arrays for number fields; for other fields a list with one value per row, or one value for all.
        """
        table: dict[Any, int] = {}
        columns = {}
        for name, value in values.items():
            if name not in NUMBERS:
                value = _interned(name, value if isinstance(value, list) else [value] * len(rank), table)
            columns[name] = np.asarray(value, np.int64)
        first = np.r_[0, np.cumsum(np.bincount(rank, minlength=num_ranks))]
        return cls(first, np.full(len(rank), CODES[kind], np.uint8), columns, tuple(table))

    @classmethod
    def stack(cls, programs: Sequence[Columns]) -> Columns:
        """Return columns of several ranks, from the columns of one rank each, in order of rank."""
        first = np.cumsum([0, *map(len, programs)])
        return woven(first, *((first[rank] + np.arange(len(part)), part) for rank, part in enumerate(programs)))

    def __len__(self) -> int:
        return len(self.op)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        if not (np.array_equal(self.first, other.first) and np.array_equal(self.op, other.op)):
            return False
        return all(_same(self, other, name) for name in {*self.columns, *other.columns})

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_ranks(self) -> int:
        """Number of programs, one per pipeline rank."""
        return len(self.first) - 1

    def column(self, name: str) -> Ints:
        """Column of a field, all `ABSENT` if no instruction has it."""
        found = self.columns.get(name)
        return np.broadcast_to(np.int64(ABSENT), len(self)) if found is None else found

    @property
    def stage(self) -> Ints:
        """Stage of each row."""
        return self.column("stage")

    @property
    def unit(self) -> Ints:
        """Unit of each row: microbatch x slices + slice."""
        return self.column("microbatch")

    @property
    def peer(self) -> Ints:
        """Pipeline rank at the other end of each message."""
        return self.column("peer")

    @cached_property
    def rank(self) -> Ints:
        """Pipeline rank of each row."""
        return _read_only(np.repeat(np.arange(self.num_ranks), np.diff(self.first)))

    def are(self, *kinds: type[Instruction]) -> Flags:
        """Mask of the rows whose instruction is an instance of one of these classes."""
        wanted = np.array([issubclass(kind, kinds) for kind in ALL])
        found: Flags = wanted[self.op]
        return found

    def rows_where(self, *kinds: type[Instruction]) -> Ints:
        """Rows whose instruction is an instance of one of these classes, in ascending order."""
        found = [rows for kind, rows in self._rows_by_kind.items() if issubclass(kind, kinds)]
        return found[0] if len(found) == 1 else np.sort(np.concatenate([np.zeros(0, np.int64), *found]))

    @cached_property
    def _rows_by_kind(self) -> dict[type[Instruction], Ints]:
        order = _read_only(np.argsort(self.op, kind="stable"))
        ends = np.cumsum(np.bincount(self.op, minlength=len(ALL)))
        return {kind: rows for kind, rows in zip(ALL, np.split(order, ends[:-1]), strict=True) if len(rows)}

    def computation_before(self, rows: Ints) -> Ints:
        """Return for each row the latest computation before it on its rank; the row itself where there is none."""
        computing = self.rows_where(*COMPUTING)
        latest = computing[np.searchsorted(computing, rows) - 1] if len(computing) else rows
        return np.where((latest < rows) & (self.rank[latest] == self.rank[rows]), latest, rows)

    def rows_of(self, rank: int) -> range:
        """Rows of one rank's program."""
        return range(int(self.first[rank]), int(self.first[rank + 1]))

    def place(self, row: int) -> tuple[int, int]:
        """Return (rank, index in the rank's program) of a row."""
        rank = int(np.searchsorted(self.first, row, side="right")) - 1
        return rank, int(row - self.first[rank])

    def place_in_words(self, row: int) -> str:
        """Return a row's index in its rank's program, and its instruction."""
        return f"{self.place(row)[1]} {self.instruction(row)}"

    def instruction(self, row: int) -> Instruction:
        """Instruction in a row."""
        kind = ALL[self.op[row]]
        found: Instruction = kind(*(self._value(name, int(self.columns[name][row])) for name in FIELDS[kind]))
        return found

    def instructions(self, rows: Sequence[int] | range) -> list[Instruction]:
        """Instructions of many rows; faster than one by one."""
        together = isinstance(rows, range) and rows.step == 1
        where = slice(rows.start, rows.stop) if together else list(rows)  # type: ignore[union-attr]
        codes = self.op[where].tolist()
        used = {*codes}
        values = {name: self._values(name, column[where]) for name, column in self.columns.items()}
        makers = [
            (kind, [*map(values.__getitem__, FIELDS[kind])]) if code in used else None for code, kind in enumerate(ALL)
        ]
        made = []
        for k, code in enumerate(codes):
            kind, of_kind = makers[code]
            made.append(kind(*map(itemgetter(k), of_kind)))
        return made

    def _value(self, name: str, number: int) -> Any:
        return number if name in NUMBERS else self.table[number]

    def _values(self, name: str, column: Ints) -> list[Any]:
        numbers = column.tolist()
        return numbers if name in NUMBERS else [self.table[n] if n >= 0 else None for n in numbers]

    def values(self, name: str, rows: Ints) -> list[Any]:
        """Values of the field `name` in these rows, which all have it."""
        return self._values(name, self.column(name)[rows])

    def pairs(self, name: str, rows: Ints) -> tuple[Ints, Ints]:
        """Stages and microbatches in the pair field `name` of these rows, which all have it."""
        used, places = np.unique(self.column(name)[rows], return_inverse=True)
        found = np.array([self.table[place] for place in used.tolist()], np.int64).reshape(-1, 2)[places]
        return found[:, 0], found[:, 1]

    @cached_property
    def apart(self) -> SplitColumns:
        """Columns with each `Overlap` split into two rows, forward first."""
        rows = self.rows_where(Overlap)
        if not len(rows):
            return SplitColumns(self, _read_only(np.arange(len(self))))
        origin = np.sort(np.concatenate([np.arange(len(self)), rows]))
        first = self.first + np.searchsorted(rows, self.first)
        op, columns = self.op[origin], {name: column[origin] for name, column in self.columns.items()}
        forwards = rows + np.arange(len(rows))
        for side, kind, name in ((forwards, Fwd, "forward"), (forwards + 1, Bwd, "backward")):
            stage, unit = self.pairs(name, rows)
            op[side] = CODES[kind]
            for field_name, values in (("stage", stage), ("microbatch", unit)):
                columns.setdefault(field_name, np.full(len(origin), ABSENT))[side] = values
            columns.pop(name)
        return SplitColumns(Columns(first, op, columns, self.table), _read_only(origin))

    def take_rows(self, rows: Ints, first: Ints) -> Columns:
        """Return columns of these rows, in this order; `first` gives the start of each rank."""
        return Columns(first, self.op[rows], {name: c[rows] for name, c in self.columns.items()}, self.table)

    def insert(self, before: Ints, *blocks: Columns) -> Columns:
        """Return the columns with rows inserted, each before row `before` of its rank, or at the end of its program.

        `before` has one entry per row of the blocks, block after block. Rows inserted before the same row keep the
        order in which they are given.
        """
        rank = np.concatenate([block.rank for block in blocks])
        order = np.lexsort((before, rank))
        places = np.empty(len(rank), np.int64)
        places[order] = before[order] + np.arange(len(rank))
        moved = np.cumsum(np.bincount(before, minlength=len(self) + 1)[: len(self)])
        first = self.first + np.r_[0, np.cumsum(np.bincount(rank, minlength=self.num_ranks))]
        ends = np.cumsum([0, *map(len, blocks)])
        new = [(places[a:b], block) for a, b, block in zip(ends[:-1], ends[1:], blocks, strict=True)]
        return woven(first, (np.arange(len(self)) + moved, self), *new)

    def append(self, *blocks: Columns) -> Columns:
        """Return the columns with the rows of the blocks appended to their ranks' programs, block after block."""
        return self.insert(np.concatenate([self.first[block.rank + 1] for block in blocks]), *blocks)


class SplitColumns(NamedTuple):
    """Columns with overlaps split, and for each of their rows the row of the plan that it comes from."""

    columns: Columns
    origin: Ints


def woven(first: Ints, *parts: tuple[Ints, Columns]) -> Columns:
    """Return columns merged from parts; the rows of each part go to the row numbers given with it."""
    size = int(first[-1])
    op, found, table = np.empty(size, np.uint8), dict[str, Ints](), dict[Any, int]()
    for places, part in parts:
        op[places] = part.op
        places_in_table = np.array([*(table.setdefault(value, len(table)) for value in part.table), ABSENT])
        for name, column in part.columns.items():
            if name not in found:
                found[name] = np.full(size, ABSENT)
            found[name][places] = column if name in NUMBERS else places_in_table[column]
    return Columns(first, op, found, tuple(table))


class _WrongValue(Exception):
    """Value `at` an index of a column that does not belong there."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view of an array."""
    view = array.view()
    view.setflags(write=False)
    return view


def _numbers(values: list[Any]) -> Ints:
    """Return integers as an array; raises `_WrongValue`."""
    if not {*map(type, values)} <= {int}:
        for at, value in enumerate(values):
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
                raise _WrongValue(at, f"is {value!r}; give a whole number")
        values = list(map(int, values))
    if max(map(abs, values), default=0) > LARGEST:
        at = next(at for at, value in enumerate(values) if abs(value) > LARGEST)
        raise _WrongValue(at, f"is larger than any number of a plan, {LARGEST}")
    return np.array(values, np.int64)


def _interned(name: str, values: list[Any], table: dict[Any, int]) -> list[int]:
    """Return the table index of each name or tuple, adding new ones; raises `_WrongValue`."""
    of_tuple, found, known = ENTRIES[name], [], dict[int, int]()
    for at, value in enumerate(values):
        if id(value) not in known:
            if of_tuple is None and type(value) is not str:
                raise _WrongValue(at, f"is {value!r}; give a name")
            plain = _pair(at, value) if name in PAIRS else value
            if of_tuple and not (isinstance(plain, tuple) and all(type(entry) is of_tuple for entry in plain)):
                wanted = "whole numbers" if of_tuple is int else "names"
                raise _WrongValue(at, f"is {value!r}; give a tuple of {wanted}")
            known[id(value)] = table.setdefault(plain, len(table))
        found.append(known[id(value)])
    return found


def _pair(at: int, value: Any) -> tuple[int, ...]:
    """Return a (stage, microbatch) pair as Python ints; raises `_WrongValue`."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise _WrongValue(at, f"is {value!r}; give a tuple of stage and microbatch")
    for entry in value:
        if isinstance(entry, bool | np.bool_) or not isinstance(entry, int | np.integer):
            raise _WrongValue(at, f"is {value!r}; give a tuple of stage and microbatch")
        if abs(int(entry)) > LARGEST:
            raise _WrongValue(at, f"is {value!r}; {entry} is larger than any number of a plan, {LARGEST}")
    return int(value[0]), int(value[1])


def _same(one: Columns, other: Columns, name: str) -> bool:
    """Compare one field of two `Columns` whose rows have the same classes of instructions."""
    theirs = other.column(name)
    if name not in NUMBERS:
        at = {value: place for place, value in enumerate(one.table)}
        theirs = np.array([*(at.get(value, ABSENT - 1) for value in other.table), ABSENT])[theirs]
    return np.array_equal(one.column(name), theirs)


def _place(first: Ints, row: int) -> str:
    rank = int(np.searchsorted(first, row, side="right")) - 1
    return f"rank {rank} instruction {row - int(first[rank])}"
