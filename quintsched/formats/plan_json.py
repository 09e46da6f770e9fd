"""The plan file: JSON, strict both ways, and the same bytes for the same plan.

A plan is data: no name in it is ever resolved to code. Every fault of a file is one `InputError` with a JSON
pointer to the place.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.collectives.collective_json import CollectiveEntry, entries
from quintsched.errors import InputError, UsageError, suggest
from quintsched.files.atomic import read_whole, write_whole
from quintsched.files.strictjson import describe_faults, parse_strict, pointer, shorten
from quintsched.ir import instructions as ins
from quintsched.ir.columns import ABSENT, FIELDS, NUMBERS, Columns, Ints
from quintsched.ir.communication import MOST, Communication, Means, Wire
from quintsched.ir.layout import Route
from quintsched.ir.mesh import AXES, Mesh
from quintsched.ir.plan_data import MAX_BUCKETS, MAX_RECOMPUTE, MAX_ZERO_EVERY, Mode, PlanData, ScheduleSpec
from quintsched.ir.programs import Programs
from quintsched.ir.zero import Zero
from quintsched.verify.wellformed import malformations

FORMAT = "quintsched.plan"
VERSION = 1
MAX_BYTES = 2**28
LARGEST = 2**24

PROGRAMS, END = '\n "programs": [\n', "]}\n"
"""What stands before the programs, and after them."""

Size = Annotated[int, Field(ge=1, le=LARGEST)]
Index = Annotated[int, Field(ge=0, le=LARGEST)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _ScheduleFile(_Strict):
    name: str = Field(min_length=1, max_length=200, pattern=r"^\P{C}*$")
    microbatches: Size
    chunks: Size
    slices: Size
    options: dict[str, int | float | str | bool]


class _RouteFile(_Strict):
    stages: list[Index]
    microbatches: list[Index]


class _WireFile(_Strict):
    latency_s: Annotated[float, Field(ge=0, le=MOST)]
    bandwidth: Annotated[float, Field(ge=1 / MOST, le=MOST)]


class _ZeroFile(_Strict):
    stage: Annotated[int, Field(ge=0, le=3)]
    every: Annotated[int, Field(ge=1, le=MAX_ZERO_EVERY)]


class _PlanFile(_Strict):
    format: Literal["quintsched.plan"]
    version: Literal[1]
    mode: Literal["train", "forward"]
    schedule: _ScheduleFile
    mesh: list[tuple[Literal["dp", "pp", "tp", "cp", "ep"], Size]]
    stage_to_pp: list[Index] = Field(min_length=1)
    stage_to_part: list[Index] | None = None
    blocks_per_stage: list[Index] | None = Field(default=None, min_length=1)
    routes: list[_RouteFile] | None = None
    buckets_per_stage: Annotated[int, Field(ge=1, le=MAX_BUCKETS)]
    recompute: list[Annotated[int, Field(ge=0, le=MAX_RECOMPUTE)]] | None = None
    tied: dict[str, list[Index]] | None = None
    skips: dict[str, list[Index]] | None = None
    losses: list[Index] | None = None
    communication: Means | None = None
    wire: _WireFile | None = None
    collectives: dict[str, CollectiveEntry] | None = None
    zero: _ZeroFile | None = None
    program_axes: list[Literal["pp"]] = Field(min_length=1, max_length=1)
    programs: list[list[Any]]


def dumps(plan: PlanData) -> str:
    """Return the text of a plan file: one instruction per line, keys in a fixed order."""
    head: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "mode": plan.mode,
        "schedule": {
            "name": plan.schedule.name,
            "microbatches": plan.schedule.microbatches,
            "chunks": plan.schedule.chunks,
            "slices": plan.schedule.slices,
            "options": dict(sorted(plan.schedule.options.items())),
        },
        "mesh": [list(axis) for axis in plan.mesh.axes],
        "stage_to_pp": list(plan.stage_to_pp),
        **({"stage_to_part": list(plan.stage_to_part)} if plan.stage_to_part is not None else {}),
        **({"blocks_per_stage": list(plan.blocks_per_stage)} if plan.blocks_per_stage else {}),
        "routes": [{"stages": list(r.stages), "microbatches": list(r.microbatches)} for r in plan.routes],
        "buckets_per_stage": plan.buckets_per_stage,
        **({"recompute": list(plan.recompute)} if any(plan.recompute) else {}),
        **({"tied": {name: list(stages) for name, stages in sorted(plan.tied.items())}} if plan.tied else {}),
        **({"skips": {name: list(stages) for name, stages in sorted(plan.skips.items())}} if plan.skips else {}),
        **({"losses": list(plan.losses)} if plan.losses else {}),
        **_communication_entries(plan.communication),
        **({"zero": {"stage": plan.zero.stage, "every": plan.zero.every}} if plan.zero.stage else {}),
        "program_axes": ["pp"],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}," for key, value in head.items()]
    return "{" + "\n".join(lines)[1:] + PROGRAMS + ",\n".join(program_texts(plan.columns)) + END


def _communication_entries(communication: Communication) -> dict[str, object]:
    """Return how buckets are exchanged; nothing where that is native. Only "auto" looks at the wire."""
    if communication.means == "native":
        return {}
    wire = communication.wire
    reckons = {"wire": {"latency_s": wire.latency_s, "bandwidth": wire.bandwidth}}
    return {
        "communication": communication.means,
        **(reckons if communication.means == "auto" else {}),
        "collectives": entries(communication.plans),
    }


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
        yield "  [" + ",\n   ".join(lines[first:end].tolist()) + "]"


def encode(instruction: ins.Instruction) -> dict[str, object]:
    """Return an instruction as plain data: its op and its fields."""
    return {"op": instruction.op} | {name: getattr(instruction, name) for name in _CODECS[instruction.op].names}


def loads(text: str | bytes) -> PlanData:
    """Read a plan; raises `InputError` with a JSON pointer to the first fault. The plan is well-formed, not proved."""
    return _loads_as_written(text) or _loads_strictly(text)


def _loads_as_written(text: str | bytes) -> PlanData | None:
    """Read a file that is written as `dumps` writes it, which is quick to see; None for any other.

    Each program is read with the standard parser, and is what it seems to be if it would be written the same again.
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
    return _wellformed(_plan_of(file, Programs(columns))) if same else None


def _program_as_written(text: str) -> Columns:
    """Return the columns of one program; raises anything for what is not written as we do."""
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
                read = _READERS[_TYPES[name]]
                values = [table.setdefault(read(value, name), len(table)) for value in values]
            elif min(values) < 0 or max(values) > LARGEST:
                raise ValueError(name)
            column[rows] = values
    return Columns(np.array([0, len(op)]), op, columns, tuple(table))


def _loads_strictly(text: str | bytes) -> PlanData:
    file = _head(text)
    programs = [tuple(_decode_program(program, rank)) for rank, program in enumerate(file.programs)]
    return _wellformed(_plan_of(file, Programs.of(programs)))


def _head(text: str | bytes) -> _PlanFile:
    """Return a file whose programs are not looked at yet."""
    data = parse_strict(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f'/format: this is not a plan file; it must say "format": "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int:
        raise InputError(f"/version: it must be a whole number; this release reads {VERSION}")
    if version > VERSION:
        raise InputError(f"/version: {version} is from the future; this release reads up to {VERSION}")
    try:
        return _PlanFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise InputError(describe_faults(error)) from error


def _wellformed(plan: PlanData) -> PlanData:
    for malformation in malformations(plan):
        where = pointer("programs", malformation.rank, malformation.index) if malformation.rank is not None else "/"
        raise InputError(f"{where}: {malformation.message}")
    return plan


def _plan_of(file: _PlanFile, programs: Programs) -> PlanData:
    if len({name for name, _ in file.mesh}) != len(file.mesh):
        raise InputError("/mesh: an axis is given twice")
    mode: Mode = file.mode
    schedule = file.schedule
    try:
        mesh = Mesh(**dict(file.mesh))
    except UsageError as error:
        raise InputError(f"/mesh: {error}") from error
    _refuse_absurd(file, len(programs.columns))
    routes = [Route(tuple(route.stages), tuple(route.microbatches)) for route in file.routes or ()]
    if file.routes is None:
        routes = [Route(tuple(range(len(file.stage_to_pp))), tuple(range(schedule.microbatches * schedule.slices)))]
    return PlanData(
        mode=mode,
        schedule=ScheduleSpec(
            schedule.name, schedule.microbatches, schedule.chunks, schedule.slices, options=schedule.options
        ),
        mesh=mesh,
        stage_to_pp=tuple(file.stage_to_pp),
        routes=tuple(routes),
        buckets_per_stage=file.buckets_per_stage,
        programs=programs,
        stage_to_part=None if file.stage_to_part is None else tuple(file.stage_to_part),
        recompute=_recompute_of(file),
        tied={name: tuple(stages) for name, stages in (file.tied or {}).items()},
        skips={name: tuple(stages) for name, stages in (file.skips or {}).items()},
        losses=tuple(file.losses or ()),
        communication=_communication_of(file),
        zero=Zero(file.zero.stage, file.zero.every) if file.zero else Zero(),
        blocks_per_stage=tuple(file.blocks_per_stage or ()),
    )


def _communication_of(file: _PlanFile) -> Communication:
    plans = {name: entry.collective("collectives", name) for name, entry in (file.collectives or {}).items()}
    if (file.wire is not None) != (file.communication == "auto"):
        raise InputError('/wire: it belongs to "communication": "auto", and to no other')
    wire = Wire() if file.wire is None else Wire(file.wire.latency_s, file.wire.bandwidth)
    return Communication(file.communication or "native", plans, wire)


def _recompute_of(file: _PlanFile) -> tuple[int, ...]:
    """Return which stages are recomputed; () where a file says of every stage that it is not."""
    if file.recompute is not None and len(file.recompute) != len(file.stage_to_pp):
        raise InputError(
            f"/recompute: it has {len(file.recompute)} values, but there are {len(file.stage_to_pp)} stages"
        )
    return tuple(file.recompute or ()) if any(file.recompute or ()) else ()


def _refuse_absurd(file: _PlanFile, num_instructions: int) -> None:
    """Refuse sizes that the programs cannot fill, before anything is made as large as they say."""
    visits = [(len(route.stages), len(route.microbatches)) for route in file.routes or ()]
    if file.routes is None:
        visits = [(len(file.stage_to_pp), file.schedule.microbatches * file.schedule.slices)]
    forwards = sum(stages * microbatches for stages, microbatches in visits)
    if max(forwards, file.schedule.microbatches * file.schedule.slices) > num_instructions:
        raise InputError(
            f"/programs: they hold {num_instructions} instructions, too few for {file.schedule.microbatches} "
            f"microbatches on {len(file.stage_to_pp)} stages"
        )


def _decode_program(program: list[Any], rank: int) -> Iterator[ins.Instruction]:
    for index, entry in enumerate(program):
        try:
            yield _decode(entry)
        except InputError as error:
            raise InputError(f"{pointer('programs', rank, index)}{error}") from None


def _decode(entry: object) -> ins.Instruction:
    """Return one instruction; the message of an `InputError` begins with the pointer below the instruction."""
    if not isinstance(entry, dict):
        raise InputError(f": an instruction is an object, not {shorten(json.dumps(entry))}")
    op = entry.get("op")
    codec = _CODECS.get(op) if isinstance(op, str) else None
    if codec is None:
        named = shorten(op) if isinstance(op, str) else shorten(json.dumps(op))
        raise InputError(f"/op: unknown instruction {named!r}{suggest(named, _CODECS)}")
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


_READERS: dict[str, Callable[[object, str], Any]] = {
    "int": _read_index,
    "str": _read_name,
    "tuple[int, ...]": _read_indices,
    "tuple[int, int]": _read_pair,
    "tuple[str, ...]": _read_axes,
}


class _Codec:
    """How one class of instruction is read, worked out from its fields."""

    def __init__(self, make: type[ins.Instruction]) -> None:
        self.make = make
        self.names = tuple(field.name for field in fields(make))
        self.readers = tuple((field.name, _READERS[str(field.type)]) for field in fields(make))

    def describe_keys(self, entry: dict[str, object]) -> str:
        """Say which key is missing or unknown."""
        for name in self.names:
            if name not in entry:
                return f": {self.make.__name__} lacks {name!r}"
        unknown = shorten(next(key for key in entry if key != "op" and key not in self.names))
        return f"{pointer(unknown)}: unknown key of {self.make.__name__}{suggest(unknown, ('op', *self.names))}"


_CODECS = {make.__name__: _Codec(make) for make in ins.ALL}
_CODE_OF = {kind.__name__: code for code, kind in enumerate(ins.ALL)}
_TYPES = {field.name: str(field.type) for kind in ins.ALL for field in fields(kind)}


def save(plan: PlanData, path: Path) -> None:
    """Write a plan file, whole or not at all; raises `UsageError` where that cannot be done."""
    text = dumps(plan)
    if len(text) > MAX_BYTES:
        raise UsageError(f"{path}: the plan has {len(text)} bytes; a plan file has at most {MAX_BYTES}")
    write_whole(path, text, "the plan")


def load(path: Path) -> PlanData:
    """Read a plan file; raises `UsageError` if it cannot be opened, `InputError` if it is broken."""
    data = read_whole(path, MAX_BYTES, "the plan")
    try:
        return loads(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
