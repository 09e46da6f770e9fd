"""Measured times as `predict` and `tune` take them: the file, and under what it was taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.strategies.flags import read_settings
from quintsched.errors import UsageError

if TYPE_CHECKING:
    from quintsched.descriptions.hardware import Hardware
    from quintsched.descriptions.model import Model
    from quintsched.descriptions.strategy import Strategy
    from quintsched.profiles.profile import Profile

ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured times to start from: a profile, Aceso's, a trace."),
]
ProfiledUnder = Annotated[
    str | None,
    typer.Option("--profiled", metavar="dp=8,tp=1,…", help="The strategy under which a trace was taken."),
]


@dataclass(frozen=True)
class Profiled:
    """Measured times, and under what they were taken."""

    file: Path
    settings: str | None
    """Of a trace: its strategy, where that is not the one asked about."""
    plan: Path | None
    """Of a trace of ours."""

    @classmethod
    def of(cls, file: Path | None, settings: str | None, plan: Path | None = None) -> Profiled | None:
        """Return what the options say; raises UsageError where a strategy is given, but no file."""
        if file is None and settings is not None:
            raise UsageError("--profiled says under which strategy the file of --profile was taken; give that too")
        return None if file is None else cls(file, settings, plan)

    def read(self, model: Model, strategy: Strategy) -> Profile:
        """Return the profile, where the strategy asked about is this one; raises UsageError and InputError."""
        from quintsched.descriptions.rows import read_strategy
        from quintsched.plan import Plan
        from quintsched.profiles.reading import Measured, read_profile

        if self.settings is not None:
            given = {"batch": strategy.batch, "seq": strategy.seq} | read_settings("--profiled", self.settings)
            strategy = read_strategy(model, given)
        plan = None if self.plan is None else Plan.load(self.plan)
        return read_profile(self.file, Measured(model, strategy, plan))

    def has_operators(self, model: Model, strategy: Strategy) -> bool:
        """Whether it has times of single operators, not of whole steps."""
        return bool(self.read(model, strategy).operators)

    def hardware(self, model: Model, hardware: Hardware, batch: int) -> Hardware:
        """Return hardware with the rates that a measured step shows; raises UsageError where there is none."""
        from quintsched.descriptions.rows import read_strategy
        from quintsched.prediction.from_profile import measured_hardware

        return measured_hardware(hardware, self.read(model, read_strategy(model, {"batch": batch})))
