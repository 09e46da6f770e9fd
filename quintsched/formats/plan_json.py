"""Plan file in JSON: read strictly, and written as identical bytes for equal plans.

A plan is data: no name in it is ever resolved to code. Every fault of a file is one `InputError` with a JSON pointer
to the place.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from quintsched.errors import InputError, suggest
from quintsched.files.strictjson import parse_strict, pointer, shorten
from quintsched.formats.plan_file_shared_fields import LARGEST, PlanFile, entries_of, plan_of, read_head, wellformed
from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_columns import ABSENT, FIELDS, NUMBERS, Columns, Ints
from quintsched.ir.layout import Route
from quintsched.ir.mesh import AXES
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs

PROGRAMS, END = '\n "programs": [\n', "]}\n"
"""Text before the programs, and after them."""

SEPARATOR = ",\n   "
"""Text between instructions."""


def dumps(plan: PlanData) -> str:
    """Return the text of a plan file: one instruction per line, keys in a fixed order."""
    lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}," for key, value in entries_of(plan).items()]
    return "{" + "\n".join(lines)[1:] + PROGRAMS + ",\n".join(program_texts(plan.columns)) + END


def program_texts(columns: Columns) -> Iterator[str]:
    """Yield the text of each rank's program."""
    texts = [json.dumps(list(value) if isinstance(value, tuple) else value) for value in columns.table]
    lines = np.empty(len(columns), object)
    for kind in ins.ALL:
        rows = columns.rows_where(kind)
        if len(rows):
            keys = (f'"{name}": %{"d" if name in NUMBERS else "s"}' for name in FIELDS[kind])
            template = "{" + ", ".join([f'"op": "{kind.__name__}"', *keys]) + "}"
            values = [columns.column(name)[rows].tolist() for name in FIELDS[kind]]
            for place, name in enumerate(FIELDS[kind]):
                if name not in NUMBERS:
                    values[place] = [texts[number] for number in values[place]]
            lines[rows] = [template % of_row for of_row in zip(*values, strict=True)] if values else template
    for first, end in pairwise(columns.first.tolist()):
        yield "  [" + SEPARATOR.join(lines[first:end].tolist()) + "]"


def encode(instruction: ins.Instruction) -> dict[str, object]:
    """Return an instruction as JSON data: its op and its fields."""
    return {"op": instruction.op} | {name: getattr(instruction, name) for name in CODECS[instruction.op].names}


def least_size(stage_to_pp: Sequence[int], routes: Sequence[Route], trains: bool) -> tuple[int, int]:
    """Return lower bounds of the instructions and bytes of such a plan: its computations and messages.

    A stage computes each microbatch forward and backward, and ranks exchange outputs and their gradients.
    """
    num_instructions = num_bytes = 0
    for route in routes:
        units, digits = len(route.microbatches), sum(len(str(unit)) for unit in route.microbatches)
        found: list[ins.Instruction] = [ins.Fwd(stage, 0) for stage in route.stages]
        found += [ins.Bwd(stage, 0) for stage in route.stages if trains]
        placed = [stage for stage in route.stages if 0 <= stage < len(stage_to_pp)]  # others are refused later on
        for one, other in pairwise(placed):
            here, there = stage_to_pp[one], stage_to_pp[other]
            if here != there:
                found += [ins.SendAct(one, 0, there), ins.RecvAct(other, 0, here)]
                found += [ins.SendGrad(other, 0, here), ins.RecvGrad(one, 0, there)] if trains else []
        num_instructions += units * len(found)
        num_bytes += sum(units * (len(json.dumps(encode(i)) + SEPARATOR) - 1) + digits for i in found)
    return num_instructions, num_bytes


def loads(text: str | bytes) -> PlanData:
    """Parse a plan; raises `InputError` with a JSON pointer to the first fault. The plan is well-formed, not proved."""
    return _loads_as_written(text) or _loads_strictly(text)


def _loads_as_written(text: str | bytes) -> PlanData | None:
    """Parse a file that has exactly the form of `dumps` (fast path); None for any other file.

    Each program is parsed without checks, and accepted if it would be written back as the same text.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        head, _, body = text.partition(PROGRAMS)
        if not body.endswith("]" + END):
            return None
        file = _head(head + PROGRAMS + END)
        chunks = body.removesuffix(END).split(",\n  [")
        chunks = [chunks[0], *(f"  [{chunk}" for chunk in chunks[1:])]
        columns = Columns.stack([_program_as_written(chunk) for chunk in chunks])
    except (InputError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    same = all(map(operator.eq, program_texts(columns), chunks))
    return wellformed(plan_of(file, Programs(columns))) if same else None


def _program_as_written(text: str) -> Columns:
    """Return the columns of one program; raises any exception for text in another form than `dumps` writes."""
    entries = json.loads(text)
    op = np.array([_CODE_OF[entry["op"]] for entry in entries], np.uint8)
    columns: dict[str, Ints] = {}
    table: dict[Any, int] = {}
    for code in np.unique(op).tolist():
        rows = np.flatnonzero(op == code)
        mine = [entries[row] for row in rows.tolist()]
        for name in FIELDS[ins.ALL[code]]:
            column = columns.setdefault(name, np.full(len(op), ABSENT))
            values = [entry[name] for entry in mine]
            if name not in NUMBERS:
                read = READERS[TYPES[name]]
                values = [table.setdefault(read(value, name), len(table)) for value in values]
            elif min(values) < 0 or max(values) > LARGEST:
                raise ValueError(name)
            column[rows] = values
    return Columns(np.array([0, len(op)]), op, columns, tuple(table))


def _loads_strictly(text: str | bytes) -> PlanData:
    file = _head(text)
    programs = [tuple(_decode_program(program, rank)) for rank, program in enumerate(file.programs)]
    return wellformed(plan_of(file, Programs.from_programs(programs)))


def _head(text: str | bytes) -> PlanFile:
    """Return a file whose programs are not checked yet."""
    return read_head(parse_strict(text), PlanFile)


def _decode_program(program: list[Any], rank: int) -> Iterator[ins.Instruction]:
    for index, entry in enumerate(program):
        try:
            yield _decode(entry)
        except InputError as error:
            raise InputError(f"{pointer('programs', rank, index)}{error}") from None


def _decode(entry: object) -> ins.Instruction:
    """Return one instruction; the message of an `InputError` begins with the pointer within the instruction."""
    if not isinstance(entry, dict):
        raise InputError(f": an instruction is an object, not {shorten(json.dumps(entry))}")
    op = entry.get("op")
    codec = CODECS.get(op) if isinstance(op, str) else None
    if codec is None:
        named = shorten(op) if isinstance(op, str) else shorten(json.dumps(op))
        raise InputError(f"/op: unknown instruction {named!r}{suggest(named, CODECS)}")
    if len(entry) != len(codec.names) + 1 or not all(name in entry for name in codec.names):
        raise InputError(codec.describe_keys(entry))
    return codec.make(*[read(entry[name], name) for name, read in codec.readers])


def _read_index(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise InputError(f"/{name}: {shorten(json.dumps(value))} is not a whole number from 0 to {LARGEST}")
    return value


def _read_indices(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InputError(f"/{name}: {shorten(json.dumps(value))} is not a list of whole numbers")
    return tuple(_read_index(item, name) for item in value)


def _read_pair(value: object, name: str) -> tuple[int, ...]:
    found = _read_indices(value, name)
    if len(found) != 2:
        raise InputError(f"/{name}: {shorten(json.dumps(value))} is not a stage and a microbatch")
    return found


def _read_axes(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(axis in AXES for axis in value):
        raise InputError(f"/{name}: {shorten(json.dumps(value))} is not a list of axes among {', '.join(AXES)}")
    return tuple(value)


def _read_name(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 200:
        raise InputError(f"/{name}: {shorten(json.dumps(value))} is not a name of 1 to 200 printable letters")
    return value


READERS: dict[str, Callable[[object, str], Any]] = {
    "int": _read_index,
    "str": _read_name,
    "tuple[int, ...]": _read_indices,
    "tuple[int, int]": _read_pair,
    "tuple[str, ...]": _read_axes,
}
"""Readers of an instruction's fields, by type; the message of an `InputError` begins with the field's name."""


class _Codec:
    """Reader of one class of instruction, derived from its fields."""

    def __init__(self, make: type[ins.Instruction]) -> None:
        self.make = make
        self.names = tuple(field.name for field in fields(make))
        self.readers = tuple((field.name, READERS[str(field.type)]) for field in fields(make))

    def describe_keys(self, entry: dict[str, object]) -> str:
        """Return the message for a missing or unknown key."""
        for name in self.names:
            if name not in entry:
                return f": {self.make.__name__} lacks {name!r}"
        unknown = shorten(next(key for key in entry if key != "op" and key not in self.names))
        return f"{pointer(unknown)}: unknown key of {self.make.__name__}{suggest(unknown, ('op', *self.names))}"


CODECS = {make.__name__: _Codec(make) for make in ins.ALL}
_CODE_OF = {kind.__name__: code for code, kind in enumerate(ins.ALL)}
TYPES = {field.name: str(field.type) for kind in ins.ALL for field in fields(kind)}
