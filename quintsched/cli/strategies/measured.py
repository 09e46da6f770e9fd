"""What `--profile` has measured, for one row of flags.

predict … --profile profiled-time-l4/                                operators: Aceso's, of the nearest model
predict … --profile trace.json --profile-at dp=1,batch=8             a step of torch.profiler, taken under these flags
predict … --profile traces/ --profile-at plan=plan.json,pp=2         a trace of our own, and its plan

`--profile-at` says what was different of the row when a trace was taken: any of the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintsched.cli.output import read_plan
from quintsched.cli.strategies.flags import FLAGS, read_flag
from quintsched.errors import UsageError, suggest

if TYPE_CHECKING:
    from quintsched.profiles.profile import Profile

PLAN = "plan"
AXES = ("gpus", "dp", "tp", "pp", "cp", "ep")
"""Where one of these is given, the others are found anew."""


def measured_profile(path: Path, at: str | None, row: Mapping[str, Any]) -> Profile:
    """Return the profile of a file or folder; raises `UsageError` for `--profile-at` that cannot be read."""
    from quintsched.descriptions.rows import read_row
    from quintsched.profiles.reading import Measured, read_profile

    changed = _changes(at or "")
    plan = changed.pop(PLAN, None)
    kept = {name: value for name, value in row.items() if name not in AXES} if changed.keys() & set(AXES) else row
    taken = read_row({**kept, **changed})
    return read_profile(path, Measured(taken.model, taken.strategy, read_plan(str(plan)) if plan else None))


def _changes(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in (*FLAGS, "sequence_parallel", PLAN):
            known = suggest(name, (*FLAGS, PLAN))
            raise UsageError(f"--profile-at: cannot read {part!r}; write dp=1,batch=8{known}")
        found[name] = _value(name, value.strip())
    return found


def _value(name: str, text: str) -> Any:
    if name == "sequence_parallel":
        return text.lower() in ("true", "1", "yes")
    return text if name == PLAN else read_flag(name, text)
