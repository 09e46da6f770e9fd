"""Readers of setting values: one function per kind of value, which checks it and names the setting in its error.

    ("microbatches", np.int64(8))  ─▶  8
    ("microbatches", True)         ─▶  UsageError: microbatches is True; give a whole number
    ("tied", {"w": [0, 3]})        ─▶  {"w": (0, 3)}

Also parsers of command-line text into such values, and the form in which plans store them. Heavy imports are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintsched.errors import UsageError, quoted
from quintsched.ir.collective_means_and_wire import LARGEST_FIGURE, Wire, find_means
from quintsched.ir.mesh import Mesh, whole_number

if TYPE_CHECKING:
    from quintsched.plan import Plan
    from quintsched.schedules import Schedule
    from quintsched.simulation.costs import Costs

Read = Callable[[str, Any], Any]
"""Reader (name, value) → checked value; raises a `UsageError` that begins with the name."""


def _refuse(name: str, value: object, words: str) -> UsageError:
    return UsageError(f"{name} is {quoted(value)}; {words}")


def read_whole_number(name: str, value: object) -> int:
    """Read a whole number, numpy integers included; raises `UsageError`."""
    found = whole_number(value)
    if found is None:
        written = f": {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        raise _refuse(name, value, f"give a whole number{written}")
    return found


def read_flag(name: str, value: object) -> bool:
    """Read true or false; raises `UsageError`."""
    if not isinstance(value, bool):
        raise _refuse(name, value, "give true or false")
    return value


def optional(read: Read) -> Read:
    """Return a reader that also accepts None."""
    return lambda name, value: None if value is None else read(name, value)


def read_buckets(name: str, value: object) -> int:
    """Read the number of gradient buckets per stage; raises `UsageError`."""
    from quintsched.ir.plan_data import MAX_BUCKETS

    found = whole_number(value)
    if found is None or not 1 <= found <= MAX_BUCKETS:
        raise _refuse(name, value, f"give a whole number from 1 to {MAX_BUCKETS}")
    return found


def read_number(name: str, value: object) -> float:
    """Read a number (numpy too) that is finite and at most `LARGEST_FIGURE` in magnitude; whole numbers stay int."""
    found = whole_number(value)
    if found is None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise _refuse(name, value, "give a finite number")
    number = float(value) if found is None else found  # type: ignore[arg-type]
    if not -LARGEST_FIGURE <= number <= LARGEST_FIGURE:
        raise _refuse(name, number, "give a finite number")
    return number


def read_wholes(name: str, value: object) -> tuple[int, ...]:
    """Read whole numbers from any iterable but text, bytes and mappings; raises `UsageError`."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise _refuse(name, value, "give whole numbers")
    return tuple(read_whole_number(name, item) for item in value)


def read_counts(name: str, value: object) -> tuple[int, ...]:
    """Read a non-empty sequence of whole numbers ≥ 0; raises `UsageError`."""
    found = read_wholes(name, value)
    if not found or min(found) < 0:
        raise _refuse(name, value, "give a whole number from 0 on for each stage")
    return found


def read_whole_or_wholes(name: str, value: object) -> int | tuple[int, ...]:
    """Read one whole number or a sequence of them; raises `UsageError`."""
    found = whole_number(value)
    return read_wholes(name, value) if found is None else found


def read_ties(name: str, value: object) -> dict[str, tuple[int, ...]]:
    """Read the stages that hold each tied weight, by name; raises `UsageError`."""
    words = "give the stages that hold each weight: {'embedding': (0, 3)}; names of weights go to Engine(…, tied=…)"
    return _read_named_stages(name, value, f"{words}, which knows those of a split model")


def read_skips(name: str, value: object) -> dict[str, tuple[int, ...]]:
    """Read the stages of each skip, by name: the one that makes it, then those that take it; raises `UsageError`."""
    return _read_named_stages(name, value, "give the stage that makes each, then those that take it: {'h': (0, 3, 5)}")


def _read_named_stages(name: str, value: object, words: str) -> dict[str, tuple[int, ...]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(name, value, words)
    for key, stages in value.items():
        if isinstance(stages, tuple | list) and any(isinstance(stage, str) for stage in stages):
            raise _refuse(f"{name} {quoted(key)}", stages, words)
    numbers = {key: whole_number(stages) for key, stages in value.items()}
    return {
        key: read_wholes(f"{name} {quoted(key)}", value[key]) if number is None else (number,)
        for key, number in numbers.items()
    }


def read_text(name: str, value: object) -> str:
    """Read text; raises `UsageError`."""
    if not isinstance(value, str):
        raise _refuse(name, value, "give text")
    return value


def read_schedule(name: str, value: object) -> Schedule:
    """Read a schedule, or resolve the name of one; raises `UsageError`."""
    from quintsched.import_user_code import load_schedule
    from quintsched.schedules import Schedule

    if isinstance(value, Schedule):
        return value
    if not isinstance(value, str):
        raise _refuse(
            name,
            value,
            "give the name of a schedule, my_file.py:my_schedule, or a Schedule, as @qs.schedule makes it",
        )
    return load_schedule(value)


def mesh_text(_name: str, value: Any) -> Any:
    """Check a mesh and return it unchanged, as it is written."""
    Mesh.parse(value)
    return value


def read_costs(name: str, value: object) -> Costs:
    """Check that a value is `Costs`; raises `UsageError`."""
    from quintsched.simulation.costs import Costs

    if not isinstance(value, Costs):
        raise _refuse(name, value, "give a quintsched.Costs; Costs.load reads a file")
    return value


def load_costs(path: str) -> Costs:
    """Read the costs file at `path`; raises `UsageError` or `InputError`."""
    from quintsched.simulation.costs import Costs

    return Costs.load(Path(path))


def read_communication(_name: str, value: object) -> str:
    """Read the means of gradient exchange ("native", "auto", …); raises `UsageError`."""
    return find_means(value)  # type: ignore[arg-type]  # refuses all that is no name


def read_wire(name: str, value: object) -> Wire:
    """Check that a value is a `Wire`; raises `UsageError`."""
    if not isinstance(value, Wire):
        raise _refuse(name, value, "give a quintsched.collectives.Wire")
    return value


def parse_numbers(name: str, text: str, example: str = "1 or 0,1,1,0") -> int | tuple[int, ...]:
    """Parse "1" or "0,1,1,0"; raises `UsageError`."""
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) <= 9 for part in parts):
        raise UsageError(
            f"{name}: cannot read {quoted(text)}; write whole numbers with commas between them, like {example}"
        )
    return tuple(map(int, parts)) if len(parts) > 1 else int(text)


def parse_stages(name: str, text: str) -> tuple[int, ...]:
    """Parse "0,1,1,0"; raises `UsageError`."""
    found = parse_numbers(name, text, "0,1,1,0")
    return (found,) if isinstance(found, int) else found


def parse_ties(name: str, texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse texts such as "embedding=0,3"; raises `UsageError`."""
    return _parse_named_stages(name, texts, "the stages that hold it", "embedding=0,3")


def parse_skips(name: str, texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse texts such as "h=0,3,5"; raises `UsageError`."""
    return _parse_named_stages(name, texts, "the stages that make and take it", "h=0,3,5")


def _parse_named_stages(name: str, texts: Sequence[str], which: str, example: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        key, equals, stages = text.rpartition("=")
        if not equals:
            raise UsageError(f"{name}: cannot read {quoted(text)}; write a name and {which}: {example}")
        if key in found:
            raise UsageError(f"{name}: {quoted(key)} is given twice; name all {which.removeprefix('the ')} at once")
        numbers = parse_numbers(name, stages, example)
        found[key] = (numbers,) if isinstance(numbers, int) else numbers
    return found


def name_in(value: str, plan: Plan) -> str:
    """Return the name by which a plan stores a schedule; the name in a plan itself is never resolved to code."""
    return value if value == plan.schedule.name else read_schedule("schedule", value).name


def means_in(value: str, plan: Plan) -> str:
    """Return the means that a plan stores for a setting; "auto" is stored as "native" if nothing was spelled out."""
    from quintsched.verify.planned_collectives import calls_of, stays_native

    return "native" if value == "auto" and stays_native(calls_of(plan)) else value


def every_stage(value: int | tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return a setting as one number per stage."""
    return (value,) * len(plan.stage_to_pp) if isinstance(value, int) else value


def losses_in(value: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return the stages with a loss; by default the last stage of each route."""
    return tuple(value) or tuple(route.stages[-1] for route in plan.routes)


def wire_in(plan: Plan) -> Wire | None:
    """Return the wire that a plan's "auto" or "two-level" was computed with; None for other means, which use none."""
    return plan.communication.wire if plan.communication.uses_wire else None
