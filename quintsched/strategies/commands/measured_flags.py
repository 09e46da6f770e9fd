"""Measurements given by `--profile`, applied to one row of flags.

predict … --profile profiled-time-l4/                                operators: Aceso's, of the nearest model
predict … --profile trace.json --profile-at dp=1,batch=8             a step of torch.profiler, taken under these flags
predict … --profile traces/ --profile-at plan=plan.json,pp=2         a trace of our own, and its plan

`--profile-at` gives the flags that were different when a trace was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.shared_options import read_plan
from quintsched.errors import UsageError
from quintsched.strategies.commands.flags import read_settings

if TYPE_CHECKING:
    from quintsched.strategies.profiles.profile import Profile

PLAN = "plan"
COUNTED_AXES = ("gpus", "dp", "tp", "pp", "cp", "ep")
"""Axes: if one of these is given, the others are derived anew."""

ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE|DIR", help="What was measured, in place of the datasheet's rates."),
]
ProfileAt = Annotated[
    str | None,
    typer.Option("--profile-at", metavar="dp=1,batch=8,…", help="Under what a trace was taken, where flags differ."),
]


@dataclass(frozen=True)
class MeasuredStart:
    """Measured file with the circumstances of the measurement."""

    path: Path
    changes: Mapping[str, Any]
    """Flags that were different when the trace was taken."""

    @classmethod
    def from_options(cls, path: Path | None, at: str | None) -> MeasuredStart | None:
        """Return the values of the two options; raises `UsageError` if they are invalid, or the first is missing."""
        if path is None and at is not None:
            raise UsageError("--profile-at says under what --profile was taken; give that too")
        return None if path is None else cls(path, read_settings("--profile-at", at or "", (PLAN,)))

    def profile(self, row: Mapping[str, Any]) -> Profile:
        """Return the profile of the file or folder, for a row of flags."""
        from quintsched.strategies.descriptions.flag_rows import read_row
        from quintsched.strategies.profiles.read_profile import Measured, read_profile

        changed = dict(self.changes)
        plan = changed.pop(PLAN, None)
        kept = (
            {name: value for name, value in row.items() if name not in COUNTED_AXES}
            if changed.keys() & set(COUNTED_AXES)
            else row
        )
        taken = read_row({**kept, **changed})
        return read_profile(self.path, Measured(taken.model, taken.strategy, read_plan(str(plan)) if plan else None))
