"""Binary plan file for millions of instructions: compressed columns; `zcat plan.qplan | head -1` prints its head.

    {"format": "quintsched.plan.columns", …, "lengths": [4, 6], "ops": ["Fwd", "Bwd"], "columns": {"stage": 1, …}, …}
    op       one byte per instruction, rank after rank: its index in `ops`
    stage    one little-endian number of the given width per instruction that has the field; two for a pair
    …        the fields in the order of `columns`; for values that are not numbers, their index in `table`

All of it is one gzip stream. Its parts are decompressed only when their size is known from earlier parts and within
the limits. Absent fields take no space, so no instruction can have missing or extra fields.
"""

from __future__ import annotations

import json
import zlib
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from quintsched.errors import InputError, UsageError, counted, suggest
from quintsched.files.strictjson import parse_strict, pointer
from quintsched.formats.plan_file_shared_fields import (
    LARGEST,
    HeadFile,
    PlanIndex,
    entries_of,
    plan_of,
    read_head,
    wellformed,
)
from quintsched.formats.plan_json import READERS, TYPES
from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_columns import ABSENT, CODES, FIELDS, NUMBERS, PAIRS, Codes, Columns, Flags, Ints
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs

COLUMNS_FORMAT = "quintsched.plan.columns"
MAGIC = b"\x1f\x8b"
"""First bytes of a file in this format, whatever its name."""

MOST_INSTRUCTIONS = 2**23
"""Maximum number of instructions of a plan in such a file."""

MOST_PAIRS = 2**21
"""Maximum number of overlaps among them."""

MOST_HEAD = 2**24
"""Maximum number of bytes of a head."""

LEVEL, GZIP, BLOCK = 6, 31, 2**20
NUMBER_WIDTHS = (1, 2, 4)
"""Possible widths of a number, in bytes."""

CLASS_BY_NAME = {kind.__name__: kind for kind in ins.ALL}
FIELD_NAMES = tuple(dict.fromkeys(name for kind in ins.ALL for name in FIELDS[kind]))
"""Names of all fields, in the order of their columns in a file."""

ColumnNumbers = npt.NDArray[Any]


class _ColumnsFile(HeadFile):
    lengths: list[PlanIndex]
    ops: list[str] = Field(max_length=len(CLASS_BY_NAME))
    columns: dict[str, Literal[1, 2, 4]]
    table: list[str | list[Annotated[int, Field(ge=0, le=LARGEST)]] | list[str]]


def pack(plan: PlanData) -> bytes:
    """Return the bytes of a plan's file.

    Raises `UsageError` for numbers out of range, too many overlaps, or a head that is too large.
    """
    columns = plan.columns
    if len(columns.rows_where(ins.Overlap)) > MOST_PAIRS:
        raise UsageError(f"the plan has {len(columns.rows_where(ins.Overlap))} overlaps; a file takes {MOST_PAIRS}")
    kinds = [kind for kind in ins.ALL if len(columns.rows_where(kind))]
    place = np.zeros(len(ins.ALL), np.uint8)
    place[[CODES[kind] for kind in kinds]] = np.arange(len(kinds))
    table: dict[Any, int] = {}
    found = {name: _values(columns, name, columns.rows_where(*_having(kinds, name)), table) for name in _names(kinds)}
    widths = {
        name: next(width for width in NUMBER_WIDTHS if values.max() < 256**width) for name, values in found.items()
    }
    head = entries_of(plan) | {
        "format": COLUMNS_FORMAT,
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
    """Parse a plan file; raises `InputError` with the place of the first fault. The plan is well-formed, not proved."""
    stream = _Stream(data)
    line = stream.line(MOST_HEAD)
    if line.endswith(b'"quintsched.plan",'):
        raise InputError("it is a compressed plan file in JSON: unpack it, or save the plan under a name with .qplan")
    file = read_head(parse_strict(line), _ColumnsFile, COLUMNS_FORMAT)
    first = np.array([0, *accumulate(file.lengths)])
    if first[-1] > MOST_INSTRUCTIONS:
        raise InputError(f"/lengths: {first[-1]} instructions are more than the {MOST_INSTRUCTIONS} that are read")
    kinds = [_kind(name, place) for place, name in enumerate(file.ops)]
    if len(set(kinds)) < len(kinds):
        raise InputError("/ops: an instruction is named twice")
    if list(file.columns) != _names(kinds):
        raise InputError(f"/columns: these instructions have the columns {', '.join(_names(kinds))}, in this order")
    op = _read_ops(stream.numbers(int(first[-1]), 1), kinds, first)
    read = _ColumnReader(first, op, file.table)
    for name, width in file.columns.items():
        read.read_column(name, stream, width)
    stream.require_end()
    return wellformed(plan_of(file, Programs(Columns(first, op, read.columns, tuple(read.table)))))


def _kind(name: str, place: int) -> type[ins.Instruction]:
    if name not in CLASS_BY_NAME:
        raise InputError(
            f"{pointer('ops', place)}: unknown instruction {name[:60]!r}{suggest(name[:60], CLASS_BY_NAME)}"
        )
    return CLASS_BY_NAME[name]


def _names(kinds: list[type[ins.Instruction]]) -> list[str]:
    return [name for name in FIELD_NAMES if _having(kinds, name)]


def _having(kinds: list[type[ins.Instruction]], name: str) -> list[type[ins.Instruction]]:
    return [kind for kind in kinds if name in FIELDS[kind]]


def _values(columns: Columns, name: str, rows: Ints, table: dict[Any, int]) -> Ints:
    """Return the stored numbers of a field in some rows; other values are added to the table in order of appearance."""
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


def _read_ops(places: ColumnNumbers, kinds: list[type[ins.Instruction]], first: Ints) -> Codes:
    wrong = places >= len(kinds)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(f"{_pointer(first, row)}/op: {places[row]} is no place among the {len(kinds)} of /ops")
    codes = np.array([CODES[kind] for kind in kinds], np.uint8)
    return codes[places]


def _pointer(first: Ints, row: int) -> str:
    rank = int(np.searchsorted(first, row, side="right")) - 1
    return pointer("programs", rank, row - int(first[rank]))


class _ColumnReader:
    """Columns of a file while it is read; each column is checked before memory is allocated for the next."""

    def __init__(self, first: Ints, op: Codes, table: list[Any]) -> None:
        self.first, self.op = first, op
        self.values = [tuple(value) if isinstance(value, list) else value for value in table]
        self.table = {value: place for place, value in enumerate(self.values)}
        if len(self.table) < len(self.values):
            raise InputError("/table: a value is given twice")
        self.columns: dict[str, Ints] = {}

    def read_column(self, name: str, stream: _Stream, width: int) -> None:
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
        """Refuse table entries that are no valid values of a field."""
        for place in np.unique(column[column != ABSENT]).tolist():
            value = self.values[place]
            try:
                READERS[TYPES[name]](list(value) if isinstance(value, tuple) else value, name)
            except InputError as error:
                raise InputError(f"{_pointer(self.first, int((column == place).argmax()))}{error}") from None

    def _interned(self, values: ColumnNumbers) -> Ints:
        """Return the table index of each pair, adding new ones."""
        both = values.reshape(-1, 2).astype(np.int64)
        used, places = np.unique(both[:, 0] * (LARGEST + 1) + both[:, 1], return_inverse=True)
        pairs = (divmod(pair, LARGEST + 1) for pair in used.tolist())
        at = np.array([self.table.setdefault(pair, len(self.table)) for pair in pairs], np.int64)
        found: Ints = at[places.reshape(-1)]
        return found


class _Stream:
    """Gzip stream that is decompressed on demand."""

    def __init__(self, data: bytes) -> None:
        self._unpacker = zlib.decompressobj(GZIP)
        self._packed, self._ahead = data, b""

    def line(self, most: int) -> bytes:
        """Return the first line, of at most `most` bytes."""
        blocks: list[bytes] = []
        while not blocks or b"\n" not in blocks[-1]:
            if len(blocks) * BLOCK > most:
                raise InputError(f"its head has more bytes than the {most} that are read")
            blocks.append(self._unpack(BLOCK))
            if not blocks[-1]:
                raise InputError("its head has no end: is it truncated?")
        found, _, self._ahead = b"".join(blocks).partition(b"\n")
        return found

    def numbers(self, count: int, width: int) -> ColumnNumbers:
        """Return the next `count` numbers of `width` bytes each."""
        size = count * width
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        if len(taken) < size:
            taken += self._unpack(size - len(taken))
        if len(taken) < size:
            raise InputError(f"it ends {counted(size - len(taken), 'byte')} too early: is it truncated?")
        return np.frombuffer(taken, f"<u{width}")

    def require_end(self) -> None:
        """Raise `InputError` if more follows the last column, or the stream is damaged or cut off."""
        if self._ahead or self._unpack(1) or not self._unpacker.eof or self._unpacker.unused_data:
            raise InputError("it does not end with its last column: it is truncated, or more follows")

    def _unpack(self, most: int) -> bytes:
        try:
            found = self._unpacker.decompress(self._packed, most)
        except zlib.error as error:
            raise InputError(f"not a gzip stream, or a damaged one: {error}") from None
        self._packed = self._unpacker.unconsumed_tail
        return found
