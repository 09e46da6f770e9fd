"""Plan files: JSON, or by the name `.qplan` compressed columns. Which of the two a file is, its first bytes say.

plan.json     text, one instruction per line      at most 256 MiB: some four million instructions
plan.qplan    columns, compressed                 at most 2**23 instructions
"""

from __future__ import annotations

from pathlib import Path

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole, write_whole
from quintsched.formats import plan_columns, plan_json
from quintsched.ir.plan_data import PlanData

SUFFIX = ".qplan"
MAX_BYTES = 2**28
"""The most bytes of a plan file, of either form."""


def save(plan: PlanData, path: Path) -> None:
    """Write a plan file, whole or not at all; raises `UsageError` where that cannot be done."""
    if path.suffix == SUFFIX:
        require_room(path, plan.num_instructions, 0)
        write_whole(path, plan_columns.pack(plan), "the plan")
        return
    text = plan_json.dumps(plan)
    require_room(path, plan.num_instructions, len(text))
    write_whole(path, text, "the plan")


def require_room(path: Path, num_instructions: int, num_bytes: int, *, least: str = "") -> None:
    """Raise `UsageError` where a plan does not go into a file of this name; `num_bytes` are those of its JSON.

    `least` stands before the size in the message, where it is known that far: "at least ".
    """
    most = plan_columns.MOST_INSTRUCTIONS
    if path.suffix != SUFFIX and num_bytes > MAX_BYTES:
        raise UsageError(
            f"{path}: the plan has {least}{num_bytes} bytes; a plan file in JSON has at most {MAX_BYTES}; name it "
            f"{path.with_suffix(SUFFIX).name} to have its columns written, compressed"
        )
    if path.suffix == SUFFIX and num_instructions > most:
        raise UsageError(
            f"{path}: the plan has {least}{num_instructions} instructions; a plan file has at most {most}: take fewer "
            "microbatches, chunks or slices"
        )


def load(path: Path) -> PlanData:
    """Read a plan file; raises `UsageError` if it cannot be opened, `InputError` if it is broken."""
    data = read_whole(path, MAX_BYTES, "the plan")
    try:
        return loads(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def loads(data: str | bytes) -> PlanData:
    """Read what a plan file holds, in either form; raises `InputError` with the place of the first fault."""
    if isinstance(data, bytes) and data.startswith(plan_columns.MAGIC):
        return plan_columns.unpack(data)
    return plan_json.loads(data)
