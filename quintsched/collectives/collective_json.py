"""JSON form of collectives, read strictly: files of their own, and the entry "collectives" of a plan file.

A file of its own lists every step. A plan file omits `programs` that `spell` generates, so that the size of a plan
does not depend on the size of its axes; programs written by hand are stored in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.collectives.collective_program import (
    COLLECTIVE_STEPS,
    MAX_CHUNKS,
    MAX_SIZE,
    Algorithm,
    CollectiveKind,
    CollectiveProgram,
    CollectiveStep,
)
from quintsched.collectives.expand_collective import spelled
from quintsched.errors import InputError, UsageError, suggest
from quintsched.files.atomic import read_whole, write_whole
from quintsched.files.strictjson import describe_faults, parse_strict, pointer, shorten
from quintsched.files.user_records import FormatVersion

COLLECTIVE_FORMAT = "quintsched.collective"
MOST_COLLECTIVE_BYTES = 2**28


class CollectiveEntry(BaseModel):
    """Entry of a collective in a plan file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: CollectiveKind
    algorithm: Algorithm
    size: Annotated[int, Field(ge=2, le=MAX_SIZE)]
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)]
    nodes: Annotated[int, Field(ge=2, le=MAX_SIZE)] | None = None
    programs: list[list[Any]] | None = None

    def collective(self, *where: object) -> CollectiveProgram:
        """Return the collective, not yet proved; raises `InputError` with a pointer that begins with `where`."""
        try:
            if self.programs is None:
                return spelled(self.kind, self.algorithm, self.size, self.chunks, self.nodes or 1)
        except UsageError as error:
            raise InputError(f"{pointer(*where) or '/'}: {error}") from error
        programs = tuple(
            tuple(_decode_all(program, *where, "programs", rank)) for rank, program in enumerate(self.programs)
        )
        return CollectiveProgram(self.kind, self.algorithm, self.size, self.chunks, programs, self.nodes or 1)


class CollectiveFile(CollectiveEntry):
    """File of one collective."""

    format: Literal["quintsched.collective"]
    version: FormatVersion


def entries(plans: Mapping[str, CollectiveProgram]) -> dict[str, dict[str, object]]:
    """Return the collectives of a plan as JSON data, by name."""
    return {name: _head(plan) | ({} if _is_spelled(plan) else _body(plan)) for name, plan in sorted(plans.items())}


def _head(plan: CollectiveProgram) -> dict[str, object]:
    head: dict[str, object] = {"kind": plan.kind, "algorithm": plan.algorithm, "size": plan.size, "chunks": plan.chunks}
    return head | ({"nodes": plan.nodes} if plan.nodes > 1 else {})


def _body(plan: CollectiveProgram) -> dict[str, object]:
    return {"programs": [[encode(step) for step in program] for program in plan.programs]}


def _is_spelled(plan: CollectiveProgram) -> bool:
    try:
        return spelled(plan.kind, plan.algorithm, plan.size, plan.chunks, plan.nodes) == plan
    except UsageError:
        return False


def encode(step: CollectiveStep) -> dict[str, object]:
    """Return a step as JSON data: its op and its fields."""
    return {"op": step.op} | {field.name: getattr(step, field.name) for field in fields(step)}


def dumps(plan: CollectiveProgram) -> str:
    """Return the text of a file: one step per line, keys in a fixed order."""
    head = {"format": COLLECTIVE_FORMAT, "version": 1, **_head(plan)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    programs = (",\n   ".join(json.dumps(encode(step)) for step in program) for program in plan.programs)
    body = ",\n".join(f"  [{program}]" for program in programs)
    return "{" + "\n".join(lines)[1:] + f'\n "programs": [\n{body}]}}\n'


def loads(text: str | bytes) -> CollectiveProgram:
    """Parse a file's text; raises `InputError` with a JSON pointer to the first fault."""
    data = parse_strict(text)
    if not isinstance(data, dict) or data.get("format") != COLLECTIVE_FORMAT:
        raise InputError(f'/format: this is no file of a collective; it must say "format": "{COLLECTIVE_FORMAT}"')
    try:
        return CollectiveFile.model_validate_json(json.dumps(data), strict=True).collective()
    except ValidationError as error:
        raise InputError(describe_faults(error)) from error


def _decode_all(program: list[Any], *where: object) -> Iterator[CollectiveStep]:
    for index, entry in enumerate(program):
        yield _decode(entry, pointer(*where, index))


def _decode(entry: object, where: str) -> CollectiveStep:
    known = {kind.__name__: kind for kind in COLLECTIVE_STEPS}
    op = entry.get("op") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(op, str) or op not in known:
        raise InputError(f"{where}: not a step: {shorten(json.dumps(entry))}{suggest(str(op), known)}")
    wanted = {field.name: bool if field.type == "bool" else int for field in fields(known[op])}
    for name in {**entry, **wanted}:
        if name != "op" and (name not in entry or name not in wanted):
            fault = "lacks" if name in wanted else "has no"
            raise InputError(f"{where}: {op} {fault} {shorten(name)!r}; it has {', '.join(wanted)}")
        if name != "op" and type(entry[name]) is not wanted[name]:
            what = "true or false" if wanted[name] is bool else "a whole number"
            raise InputError(f"{where}/{name}: {shorten(json.dumps(entry[name]))} is not {what}")
    return known[op](**{name: entry[name] for name in wanted})


def save(plan: CollectiveProgram, path: Path) -> None:
    """Write a file; raises `UsageError` on failure."""
    write_whole(path, dumps(plan), "the collective")


def load(path: Path) -> CollectiveProgram:
    """Read a file; raises `UsageError` if it cannot be opened, `InputError` if it is broken."""
    data = read_whole(path, MOST_COLLECTIVE_BYTES, "the collective")
    try:
        return loads(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
