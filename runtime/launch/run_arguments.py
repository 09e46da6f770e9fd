"""Arguments of a run, as one object: parsed once from a command line, then passed as JSON from process to process.

    quintsched run job.yaml --nproc 4       ──JSON──▶ launcher ──JSON──▶ rank 0, rank 1, …
    torchrun … -m quintsched.runtime --config job.yaml ──flags─────────▶ each rank

A field is a flag: `min_dp` is --min-dp.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic.fields import FieldInfo

from quintsched.errors import UsageError

from ..settings.allowed_setting_values import Start
from ..settings.engine_settings import Settings
from ..settings.job_file import JobConfig, load_job, overrides_of

Texts = Annotated[tuple[str, ...], Field(strict=False)]


class RunRequest(Settings):
    """Run a job, in the environment that torchrun has set."""

    plan: str | None = None
    """A plan file; it takes precedence over the job's parallel section."""
    config: str
    """The job file."""
    set: Texts = ()
    """Override a setting of the job: A.B=C."""
    trace: str | None = None
    """Directory for a trace: when each instruction of some steps ran."""
    resume: bool = False
    """Resume from the newest checkpoint that is whole."""
    fresh: bool = False
    """Move an earlier run's checkpoints away, and start anew."""
    override: Texts = ()
    """A setting that may differ from the resumed run's: A.B."""

    autotune: bool = False
    """Try a better plan after some steps, and keep it where it is faster."""

    @property
    def start(self) -> Start:
        """Start mode of the run."""
        return "resume" if self.resume else "fresh" if self.fresh else "new"

    def load_job(self) -> JobConfig:
        """Return the job; raises `UsageError`."""
        traced = [] if self.trace is None else overrides_of("runtime", trace=self.trace)
        job = load_job(self.config, [*self.set, *traced])
        if self.override and not self.resume and job.mode == "train":
            raise UsageError(
                f"--override {self.override[0]}: it lets --resume continue a run with another value; give both, or none"
            )
        if self.resume and job.mode == "train" and job.checkpoint.dir is None:
            raise UsageError(f"{self.config}: --resume needs checkpoint.dir, the folder of the run to go on with")
        return job

    def with_set(self: Request, overrides: Sequence[str]) -> Request:
        """Return the request with further settings of the job overridden."""
        return self.model_copy(update={"set": (*self.set, *overrides)})

    def to_ranks(self) -> str:
        """Return the request as the JSON argument of a rank."""
        return self.model_dump_json(include=set(RunRequest.model_fields))


class LaunchRequest(RunRequest):
    """Start the ranks of a job on this machine, and wait for their end."""

    nproc: int | None = None
    """Processes on this machine; none: as many as the mesh has ranks."""
    restarts: int = 0
    """Number of times a failed run is started again."""
    min_dp: int | None = None
    """Restarts after ranks were lost have fewer replicas, down to so many."""
    nnodes: int = 1
    """Number of machines that run it."""
    node_rank: int = 0
    """Number of this machine among them, from 0."""
    master: str = ""
    """HOST:PORT: machine 0's address, and a free port of it."""


class VerifyRequest(RunRequest):
    """Compare some steps of a job on its mesh with one process."""

    steps: int = 2
    """Number of steps to compare."""
    as_json: bool = False
    """Print all differences, machine-readable."""
    into: str | None = None
    """Run as a rank that records its part, into a file in this directory."""


class ShowRequest(RunRequest):
    """Show what a job is, or what its blocks do in a step."""

    config: str = ""
    """The job file; for the schema, none."""
    what: Literal["facts", "plan", "row", "settings", "schema"] = "facts"
    """Facts found by one step, the plan, the flags of its prediction, all settings, or the JSON Schema of job files."""
    as_json: bool = False
    """Print facts machine-readable."""


Request = TypeVar("Request", bound=RunRequest)


def read_request(kind: type[Request], arguments: Sequence[str]) -> Request:
    """Return the request of a command line: flags, or JSON from another process."""
    if len(arguments) == 1 and arguments[0].startswith("{"):
        return kind.model_validate_json(arguments[0])
    parser = argparse.ArgumentParser(prog="python -m quintsched.runtime", description=kind.__doc__, allow_abbrev=False)
    exclusive = parser.add_mutually_exclusive_group()
    for name, field in kind.model_fields.items():
        to: Any = exclusive if name in ("resume", "fresh") else parser
        spelling = name if name == "plan" else f"--{name.replace('_', '-')}"
        to.add_argument(spelling, help=field.description, default=argparse.SUPPRESS, **_how(name, field))
    return kind(**vars(parser.parse_args(arguments)))


def _how(name: str, field: FieldInfo) -> dict[str, Any]:
    """Return a field's arguments for argparse."""
    if name == "plan":
        return {"nargs": "?"}
    if field.annotation is bool:
        return {"action": "store_true"}
    if field.annotation == tuple[str, ...]:
        return {"action": "append"}
    return {"type": int if field.annotation in (int, int | None) else str, "required": field.is_required()}
