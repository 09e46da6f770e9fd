"""The plan file for millions of instructions: a plan's columns, compressed; `zcat plan.qplan | head -1` is its head.

    {"format": "quintsched.plan.columns", …, "lengths": [4, 6], "ops": ["Fwd", "Bwd"], "columns": {"stage": 1, …}, …}
    op       one byte per instruction, rank after rank: its place among `ops`
    stage    a number of so many bytes, the lowest first, for every instruction that has the field; two for a pair
    …        the fields in the order of `columns`; of what is not a number, the place in `table`

All of it is one gzip stream. Nothing is unpacked before its size is known from what comes before it and is within the
limits. What is absent has no room here, so there is nothing that an instruction could have too much or too little of.
"""

from __future__ import annotations

import json
import zlib
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from quintsched.errors import InputError, UsageError, suggest
from quintsched.files.strictjson import parse_strict, pointer
from quintsched.formats.plan_head import LARGEST, HeadFile, Index, entries_of, plan_of, read_head, wellformed
from quintsched.formats.plan_json import READERS, TYPES
from quintsched.ir import instructions as ins
from quintsched.ir.columns import ABSENT, CODES, FIELDS, NUMBERS, PAIRS, Codes, Columns, Flags, Ints
from quintsched.ir.plan_data import PlanData
from quintsched.ir.programs import Programs

FORMAT = "quintsched.plan.columns"
MAGIC = b"\x1f\x8b"
"""How a file begins that is read here, whatever its name."""

MOST_INSTRUCTIONS = 2**23
"""The most instructions of a plan in such a file."""

MOST_PAIRS = 2**21
"""The most overlaps among them."""

MOST_HEAD = 2**24
"""The most bytes of a head."""

LEVEL, GZIP, BLOCK = 6, 31, 2**20
WIDTHS = (1, 2, 4)
"""Bytes of a number."""

KINDS = {kind.__name__: kind for kind in ins.ALL}
NAMES = tuple(dict.fromkeys(name for kind in ins.ALL for name in FIELDS[kind]))
"""All fields, in the order in which a file has their columns."""

Numbers = npt.NDArray[Any]


class _ColumnsFile(HeadFile):
    lengths: list[Index]
    ops: list[str] = Field(max_length=len(KINDS))
    columns: dict[str, Literal[1, 2, 4]]
    table: list[str | list[Annotated[int, Field(ge=0, le=LARGEST)]] | list[str]]


def pack(plan: PlanData) -> bytes:
    """Return the bytes of a file.

    Raises `UsageError` for numbers that no plan file holds, too many overlaps, or too much besides the programs.
    """
    columns = plan.columns
    if len(columns.rows_where(ins.Overlap)) > MOST_PAIRS:
        raise UsageError(f"the plan has {len(columns.rows_where(ins.Overlap))} overlaps; a file takes {MOST_PAIRS}")
    kinds = [kind for kind in ins.ALL if len(columns.rows_where(kind))]
    place = np.zeros(len(ins.ALL), np.uint8)
    place[[CODES[kind] for kind in kinds]] = np.arange(len(kinds))
    table: dict[Any, int] = {}
    found = {name: _values(columns, name, columns.rows_where(*_having(kinds, name)), table) for name in _names(kinds)}
    widths = {name: next(width for width in WIDTHS if values.max() < 256**width) for name, values in found.items()}
    head = entries_of(plan) | {
        "format": FORMAT,
        "lengths": np.diff(columns.first).tolist(),
        "ops": [kind.__name__ for kind in kinds],
        "columns": widths,
        "table": list(table),
    }
    line = json.dumps(head, allow_nan=False).encode() + b"\n"
    if len(line) > MOST_HEAD:
        raise UsageError(f"what the plan says besides its programs has {len(line)} bytes; a file takes {MOST_HEAD}")
    packer = zlib.compressobj(LEVEL, wbits=GZIP)
    parts = [line, place[columns.op].tobytes()]
    parts += [values.astype(f"<u{widths[name]}").tobytes() for name, values in found.items()]
    return b"".join([*map(packer.compress, parts), packer.flush()])


def unpack(data: bytes) -> PlanData:
    """Read a plan; raises `InputError` with the place of the first fault. The plan is well-formed, not proved."""
    stream = _Stream(data)
    line = stream.line(MOST_HEAD)
    if line.endswith(b'"quintsched.plan",'):
        raise InputError("it is a compressed plan file in JSON: unpack it, or save the plan under a name with .qplan")
    file = read_head(parse_strict(line), _ColumnsFile, FORMAT)
    first = np.array([0, *accumulate(file.lengths)])
    if first[-1] > MOST_INSTRUCTIONS:
        raise InputError(f"/lengths: {first[-1]} instructions are more than the {MOST_INSTRUCTIONS} that are read")
    kinds = [_kind(name, place) for place, name in enumerate(file.ops)]
    if len(set(kinds)) < len(kinds):
        raise InputError("/ops: an instruction is named twice")
    if list(file.columns) != _names(kinds):
        raise InputError(f"/columns: these instructions have the columns {', '.join(_names(kinds))}, in this order")
    op = _read_ops(stream.numbers(int(first[-1]), 1), kinds, first)
    read = _Reading(first, op, file.table)
    for name, width in file.columns.items():
        read.take(name, stream, width)
    stream.require_end()
    return wellformed(plan_of(file, Programs(Columns(first, op, read.columns, tuple(read.table)))))


def _kind(name: str, place: int) -> type[ins.Instruction]:
    if name not in KINDS:
        raise InputError(f"{pointer('ops', place)}: unknown instruction {name[:60]!r}{suggest(name[:60], KINDS)}")
    return KINDS[name]


def _names(kinds: list[type[ins.Instruction]]) -> list[str]:
    return [name for name in NAMES if _having(kinds, name)]


def _having(kinds: list[type[ins.Instruction]], name: str) -> list[type[ins.Instruction]]:
    return [kind for kind in kinds if name in FIELDS[kind]]


def _values(columns: Columns, name: str, rows: Ints, table: dict[Any, int]) -> Ints:
    """Return the numbers that a file holds of some rows' field; what is none goes into the table, as it comes up."""
    column = np.stack(columns.pairs(name, rows), axis=1) if name in PAIRS else columns.column(name)[rows]
    if name in PAIRS or name in NUMBERS:
        wrong = np.flatnonzero(((column < 0) | (column > LARGEST)).reshape(len(rows), -1).any(axis=1))
        if len(wrong):
            row = int(rows[wrong[0]])
            where = "rank {} instruction {}".format(*columns.place(row))
            raise UsageError(f"{where}, {columns.instruction(row)}: {name}: a file holds numbers from 0 to {LARGEST}")
        return column.reshape(-1)
    used, firsts, places = np.unique(column, return_index=True, return_inverse=True)
    numbers = np.zeros(len(used), np.int64)
    for at in np.argsort(firsts).tolist():
        numbers[at] = table.setdefault(columns.table[used[at]], len(table))
    return numbers[places.reshape(-1)]


def _read_ops(places: Numbers, kinds: list[type[ins.Instruction]], first: Ints) -> Codes:
    wrong = places >= len(kinds)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(f"{_pointer(first, row)}/op: {places[row]} is no place among the {len(kinds)} of /ops")
    codes = np.array([CODES[kind] for kind in kinds], np.uint8)
    return codes[places]


def _pointer(first: Ints, row: int) -> str:
    rank = int(np.searchsorted(first, row, side="right")) - 1
    return pointer("programs", rank, row - int(first[rank]))


class _Reading:
    """The columns of a file, as far as they are read; each number is looked at before there is room for the next."""

    def __init__(self, first: Ints, op: Codes, table: list[Any]) -> None:
        self.first, self.op = first, op
        self.values = [tuple(value) if isinstance(value, list) else value for value in table]
        self.table = {value: place for place, value in enumerate(self.values)}
        if len(self.table) < len(self.values):
            raise InputError("/table: a value is given twice")
        self.columns: dict[str, Ints] = {}

    def take(self, name: str, stream: _Stream, width: int) -> None:
        """Read the column of a field; raises `InputError`."""
        has = np.array([name in FIELDS[kind] for kind in ins.ALL])[self.op]
        size = 2 if name in PAIRS else 1
        if name in PAIRS and has.sum() > MOST_PAIRS:
            raise InputError(f"/columns/{name}: {has.sum()} overlaps are more than the {MOST_PAIRS} that are read")
        values = stream.numbers(int(has.sum()) * size, width)
        if name in NUMBERS or name in PAIRS:
            self._require(name, has, values.reshape(-1, size).max(axis=1, initial=0) <= LARGEST, f"not 0 to {LARGEST}")
        else:
            self._require(name, has, values < len(self.values), f"no place among the {len(self.values)} of /table")
        column = np.full(len(self.op), ABSENT)
        column[has] = self._interned(values) if name in PAIRS else values
        self.columns[name] = column
        if name not in NUMBERS and name not in PAIRS:
            self._require_values(name, column)

    def _require(self, name: str, has: Flags, right: Flags, fault: str) -> None:
        if not right.all():
            row = int(np.flatnonzero(has)[int((~right).argmax())])
            raise InputError(f"{_pointer(self.first, row)}/{name}: {fault}")

    def _require_values(self, name: str, column: Ints) -> None:
        """Refuse what stands in the table for a field and is none of its values."""
        for place in np.unique(column[column != ABSENT]).tolist():
            value = self.values[place]
            try:
                READERS[TYPES[name]](list(value) if isinstance(value, tuple) else value, name)
            except InputError as error:
                raise InputError(f"{_pointer(self.first, int((column == place).argmax()))}{error}") from None

    def _interned(self, values: Numbers) -> Ints:
        """Return the places of pairs in the table, which now has them all."""
        both = values.reshape(-1, 2).astype(np.int64)
        used, places = np.unique(both[:, 0] * (LARGEST + 1) + both[:, 1], return_inverse=True)
        pairs = (divmod(pair, LARGEST + 1) for pair in used.tolist())
        at = np.array([self.table.setdefault(pair, len(self.table)) for pair in pairs], np.int64)
        found: Ints = at[places.reshape(-1)]
        return found


class _Stream:
    """A gzip stream that is unpacked as far as somebody asks for it."""

    def __init__(self, data: bytes) -> None:
        self._unpacker = zlib.decompressobj(GZIP)
        self._packed, self._ahead = data, b""

    def line(self, most: int) -> bytes:
        """Return the first line, of at most so many bytes."""
        blocks: list[bytes] = []
        while not blocks or b"\n" not in blocks[-1]:
            if len(blocks) * BLOCK > most:
                raise InputError(f"its head has more bytes than the {most} that are read")
            blocks.append(self._unpack(BLOCK))
            if not blocks[-1]:
                raise InputError("its head has no end: is it truncated?")
        found, _, self._ahead = b"".join(blocks).partition(b"\n")
        return found

    def numbers(self, count: int, width: int) -> Numbers:
        """Return the next numbers of so many bytes."""
        size = count * width
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        if len(taken) < size:
            taken += self._unpack(size - len(taken))
        if len(taken) < size:
            raise InputError(f"it ends {size - len(taken)} bytes too early: is it truncated?")
        return np.frombuffer(taken, f"<u{width}")

    def require_end(self) -> None:
        """Refuse what comes after the last column, and a stream that is damaged or cut off."""
        if self._ahead or self._unpack(1) or not self._unpacker.eof or self._unpacker.unused_data:
            raise InputError("it does not end with its last column: it is truncated, or more follows")

    def _unpack(self, most: int) -> bytes:
        try:
            found = self._unpacker.decompress(self._packed, most)
        except zlib.error as error:
            raise InputError(f"not a gzip stream, or a damaged one: {error}") from None
        self._packed = self._unpacker.unconsumed_tail
        return found
