"""Trace files: measured times of a run, one file per rank, one span per instruction of its program.

    DIR/rank0.json   {"format": "quintsched.trace", "version": 1, "plan": "<sha256 of the plan's JSON>",
    DIR/rank1.json    "rank": 0, "pp_rank": 0, "unit": "s",
    …                 "steps": [{"step": 7, "start": […], "end": […], "wait": […]}, …]}
    DIR/plan.json    the plan of the run

Times are seconds on a clock that all ranks share, in the order of the program. `wait` is the part of a span in which
the instruction waited for another rank: for a message, a collective, or a send's buffer. A send's span is the call. A
receive starts when it is posted and ends when its consumer has the data; its `wait` is the time that the consumer
waited, which is also part of the consumer's own span and `wait`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.errors import InputError, MisfitError, UsageError, counted
from quintsched.files.atomic import read_whole, write_whole
from quintsched.files.strictjson import describe_faults, parse_strict, pointer
from quintsched.files.user_records import FormatVersion
from quintsched.formats.plan_json import dumps
from quintsched.formats.run_plan import differences, plan_beside
from quintsched.graph.event_graph import Times
from quintsched.ir.plan_data import PlanData

TRACE_FORMAT = "quintsched.trace"
TRACE_VERSION = 1
MOST_TRACE_BYTES = 2**28

DIGITS = 7
"""Decimals of seconds in a file: a tenth of a microsecond."""

SLACK_S = 1e-6
"""Seconds by which a wait may exceed its span due to rounding."""

MOST_S = 1e12
"""Largest time of a trace, in seconds, of either sign; beyond any real clock."""

Seconds = Annotated[float, Field(ge=-MOST_S, le=MOST_S)]
TraceIndex = Annotated[int, Field(ge=0)]


class _TraceModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _StepFile(_TraceModel):
    step: TraceIndex
    start: list[Seconds]
    end: list[Seconds]
    wait: list[Seconds]


class RankFile(_TraceModel):
    """Trace file of one rank."""

    format: Literal["quintsched.trace"]
    version: FormatVersion
    plan: str
    rank: TraceIndex
    pp_rank: TraceIndex
    unit: Literal["s"]
    steps: list[_StepFile] = Field(min_length=1)


@dataclass(frozen=True, eq=False)
class RankTrace:
    """Trace of one rank: `start`, `end` and `wait` in seconds, (steps, instructions)."""

    plan: str
    rank: int
    pp_rank: int
    steps: tuple[int, ...]
    start: Times
    end: Times
    wait: Times

    def save_rank(self, directory: Path) -> None:
        """Write `rank<rank>.json` atomically; raises `UsageError` on failure."""
        head = {
            "format": TRACE_FORMAT,
            "version": TRACE_VERSION,
            "plan": self.plan,
            "rank": self.rank,
            "pp_rank": self.pp_rank,
        }
        times = {name: np.round(getattr(self, name), DIGITS).tolist() for name in ("start", "end", "wait")}
        steps = [
            {"step": step, **{name: of_steps[place] for name, of_steps in times.items()}}
            for place, step in enumerate(self.steps)
        ]
        path = directory / file_name(self.rank)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: cannot write the trace: {error.strerror}") from error
        write_whole(path, json.dumps(head | {"unit": "s", "steps": steps}, allow_nan=False), "the trace")


def file_name(rank: int) -> str:
    """Return the file name of a global rank."""
    return f"rank{rank}.json"


def digest_of(plan: PlanData) -> str:
    """Return the digest by which a trace identifies its plan: the SHA-256 of the plan file's text."""
    return hashlib.sha256(dumps(plan).encode()).hexdigest()


def load_ranks(directory: Path, plan: PlanData) -> tuple[RankTrace, ...]:
    """Read the trace files of all ranks of a plan.

    Raises `UsageError` (no such directory), `MisfitError` (a trace of another plan) or `InputError` (a missing or
    broken file, ranks that recorded different steps).
    """
    if not directory.is_dir():
        raise UsageError(f"{directory}: there is no such directory; a run leaves its trace where `--trace` says")
    missing = [rank for rank in range(plan.mesh.size) if not (directory / file_name(rank)).exists()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise InputError(
            f"{directory}: {file_name(missing[0])} is missing{more}; the plan has {counted(plan.mesh.size, 'rank')}"
        )
    digest = digest_of(plan)
    ranks = tuple(_load_rank(directory / file_name(rank), plan, digest, rank) for rank in range(plan.mesh.size))
    for other in ranks:
        if other.steps != ranks[0].steps:
            shown = [", ".join(map(str, of_rank.steps)) for of_rank in (ranks[0], other)]
            raise InputError(f"{directory}: rank 0 recorded the steps {shown[0]}, rank {other.rank} {shown[1]}")
    return ranks


def _load_rank(path: Path, plan: PlanData, digest: str, rank: int) -> RankTrace:
    data = read_whole(path, MOST_TRACE_BYTES, "the trace")
    try:
        file = _read(data)
        if file.plan != digest:
            raise MisfitError(f"{path}: /plan: this is the trace of another plan{_difference(path.parent, file, plan)}")
        return _rank_trace(file, plan, rank)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _difference(directory: Path, file: RankFile, plan: PlanData) -> str:
    """Return how a plan differs from that of a trace, where the run has saved it beside."""
    found = plan_beside(directory)
    if found is None or digest_of(found[1]) != file.plan:
        return ""
    return f": {differences(found[1], plan)}; its own is {found[0]}"


def _read(text: bytes) -> RankFile:
    data: Any = parse_strict(text)
    if not isinstance(data, dict) or data.get("format") != TRACE_FORMAT:
        raise InputError(f'/format: this is not a trace file; it must say "format": "{TRACE_FORMAT}"')
    version = data.get("version")
    if type(version) is int and version > TRACE_VERSION:
        raise InputError(f"/version: {version} is from the future; this release reads up to {TRACE_VERSION}")
    try:
        return RankFile.model_validate(data)
    except ValidationError as error:
        raise InputError(describe_faults(error)) from error


def _rank_trace(file: RankFile, plan: PlanData, rank: int) -> RankTrace:
    pp_rank = plan.mesh.pp_rank(rank)
    if (file.rank, file.pp_rank) != (rank, pp_rank):
        raise InputError(f"/rank: it is of rank {file.rank}, pp rank {file.pp_rank}, not of rank {rank}, {pp_rank}")
    steps = tuple(entry.step for entry in file.steps)
    if len(set(steps)) != len(steps):
        raise InputError("/steps: a step is there twice")
    size = len(plan.programs[pp_rank])
    start, end, wait = (_table(file.steps, name, size) for name in ("start", "end", "wait"))
    wrong = np.argwhere((wait < 0) | (wait > end - start + SLACK_S))
    if len(wrong):
        step, index = wrong[0].tolist()
        raise InputError(f"{pointer('steps', step, 'wait', index)}: a wait is not within its instruction's span")
    return RankTrace(file.plan, rank, pp_rank, steps, start, end, wait)


def _table(steps: list[_StepFile], name: str, size: int) -> Times:
    for place, entry in enumerate(steps):
        found = len(getattr(entry, name))
        if found != size:
            where = pointer("steps", place, name)
            raise InputError(
                f"{where}: it has {counted(found, 'value')}; the program has {counted(size, 'instruction')}"
            )
    return np.array([getattr(entry, name) for entry in steps], dtype=np.float64)
