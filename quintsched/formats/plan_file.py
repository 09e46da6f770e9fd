"""Plan files: JSON, or compressed columns if the name ends in `.qplan`. Readers tell them apart by the first bytes.

plan.json     text, one instruction per line      at most 256 MiB: about four million instructions
plan.qplan    columns, compressed                 at most 2**23 instructions
"""

from __future__ import annotations

from pathlib import Path

from quintsched.errors import InputError, UsageError, counted
from quintsched.files.atomic import read_whole, write_whole
from quintsched.formats import plan_columns, plan_json
from quintsched.ir.plan_data import PlanData

SUFFIX = ".qplan"
MOST_PLAN_BYTES = 2**28
"""Maximum number of bytes of a plan file, of either form."""


def save(plan: PlanData, path: Path) -> None:
    """Write a plan file atomically; raises `UsageError` on failure."""
    if path.suffix == SUFFIX:
        require_room(path, plan.num_instructions, 0)
        write_whole(path, plan_columns.pack(plan), "the plan")
        return
    text = plan_json.dumps(plan)
    require_room(path, plan.num_instructions, len(text))
    write_whole(path, text, "the plan")


def require_room(path: Path, num_instructions: int, num_bytes: int, *, least: str = "") -> None:
    """Raise `UsageError` if a plan exceeds the limits of a file of this name; `num_bytes` is the size of its JSON.

    `least` precedes the size in the message if it is only a lower bound: "at least ".
    """
    most = plan_columns.MOST_INSTRUCTIONS
    if path.suffix != SUFFIX and num_bytes > MOST_PLAN_BYTES:
        raise UsageError(
            f"{path}: the plan has {least}{num_bytes} bytes; a plan file in JSON has at most {MOST_PLAN_BYTES}; name "
            f"it {path.with_suffix(SUFFIX).name} to have its columns written, compressed"
        )
    if path.suffix == SUFFIX and num_instructions > most:
        raise UsageError(
            f"{path}: the plan has {least}{counted(num_instructions, 'instruction')}; a plan file has at most {most}: "
            "take fewer microbatches, chunks or slices"
        )


def load(path: Path) -> PlanData:
    """Read a plan file; raises `UsageError` if it cannot be opened, `InputError` if it is broken."""
    data = read_whole(path, MOST_PLAN_BYTES, "the plan")
    try:
        return loads(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def loads(data: str | bytes) -> PlanData:
    """Parse a plan file's content, in either form; raises `InputError` with the place of the first fault."""
    if isinstance(data, bytes) and data.startswith(plan_columns.MAGIC):
        return plan_columns.unpack(data)
    return plan_json.loads(data)
