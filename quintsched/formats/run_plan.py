"""Plan file of a run, in the folders of its traces and checkpoints, and the settings in which two plans differ.

DIR/plan.json      the plan that the run executed, with what it found about the model (plan.qplan for a huge one)
DIR/rank0.json     "this is the trace of another plan: mesh is pp=2 there, but pp=4 here; …"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from quintsched.errors import QuintschedError, counted, quoted
from quintsched.files.atomic import write_whole
from quintsched.formats import plan_columns, plan_json
from quintsched.formats.plan_file import SUFFIX, load
from quintsched.formats.plan_file_shared_fields import entries_of
from quintsched.ir.plan_data import PlanData

PLAN_FILE_NAMES = ("plan.json", f"plan{SUFFIX}")
MOST_IN_JSON = 2**21
"""Most instructions of a plan that is written as JSON."""
MOST_NAMED = 4
_DERIVED = ("routes", "stage_to_pp", "stage_to_part", "collectives")
"""Entries that follow from others, and are named only where no other one differs."""


def file_of(plan: PlanData) -> tuple[str, bytes]:
    """Return the name and the content of a run's plan file."""
    if plan.num_instructions > MOST_IN_JSON:
        return PLAN_FILE_NAMES[1], plan_columns.pack(plan)
    return PLAN_FILE_NAMES[0], plan_json.dumps(plan).encode()


def save_beside(plan: PlanData, directory: Path) -> Path:
    """Write the plan of a run into a directory, and return the file; raises `UsageError` on failure."""
    name, content = file_of(plan)
    write_whole(directory / name, content, "the plan")
    return directory / name


def plan_beside(directory: Path) -> tuple[Path, PlanData] | None:
    """Return the file and the plan of the run that left it in a directory; None where there is none to read."""
    for path in (directory / name for name in PLAN_FILE_NAMES):
        try:
            if path.exists():
                return path, load(path)
        except QuintschedError:
            continue
    return None


def differences(there: PlanData, here: PlanData) -> str:
    """Return in which settings two plans differ: "mesh is pp=2 there, but pp=4 here; chunks is 2 there, but 1 here"."""
    before, after = dict(_flat(entries_of(there))), dict(_flat(entries_of(here)))
    before["mesh"], after["mesh"] = str(there.mesh), str(here.mesh)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    named = [name for name in names if name not in _DERIVED] or names
    words = [f"{name} is {_shown(before.get(name))} there, but {_shown(after.get(name))} here" for name in named]
    more = [f"and {len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return "; ".join([*words[:MOST_NAMED], *more]) or _instructions(there, here)


def _flat(entries: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in entries.items():
        if isinstance(value, Mapping) and name not in _DERIVED:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    return value if isinstance(value, str) else quoted(value)


def _instructions(there: PlanData, here: PlanData) -> str:
    """Return the first instruction that differs between plans with the same settings."""
    for rank, (before, after) in enumerate(zip(there.programs, here.programs, strict=True)):
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            if one != other:
                return f"settings are the same, but instruction {index} of pp rank {rank} is {one} there, {other} here"
        if len(before) != len(after):
            return (
                f"settings are the same, but pp rank {rank} has "
                f"{counted(len(before), 'instruction')} there, {len(after)} here"
            )
    return "they are written differently, but equal"
