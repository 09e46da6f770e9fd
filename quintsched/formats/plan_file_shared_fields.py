"""Common part of both forms of a plan file: all but the programs, read strictly, and the shared checks.

A plan is data: no name in it is ever resolved to code. Every fault is one `InputError` with a JSON pointer to the
place.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.collectives.collective_json import CollectiveEntry, entries
from quintsched.collectives.collective_program import MAX_SIZE
from quintsched.errors import InputError, UsageError, counted
from quintsched.files.strictjson import describe_faults, pointer
from quintsched.files.user_records import FormatVersion
from quintsched.ir.collective_means_and_wire import LARGEST_FIGURE, Communication, Means, Wire
from quintsched.ir.layout import Route
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import MAX_BUCKETS, MAX_RECOMPUTE, MAX_ZERO_EVERY, Mode, PlanData, ScheduleSpec
from quintsched.ir.rank_programs import Programs
from quintsched.ir.zero_setting import Zero
from quintsched.verify.wellformed import find_malformations

PLAN_FORMAT = "quintsched.plan"
PLAN_VERSION = 1
LARGEST = 2**24
"""Largest number in a plan file."""

MOST_CELLS = 2**26
"""Maximum number of (stage, microbatch) pairs, whether they are on a route or not."""

Size = Annotated[int, Field(ge=1, le=LARGEST)]
PlanIndex = Annotated[int, Field(ge=0, le=LARGEST)]


class _PlanFileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _ScheduleFile(_PlanFileModel):
    name: str = Field(min_length=1, max_length=200, pattern=r"^\P{C}*$")
    microbatches: Size
    chunks: Size
    slices: Size
    options: dict[str, int | float | str | bool]


class _RouteFile(_PlanFileModel):
    stages: list[PlanIndex]
    microbatches: list[PlanIndex]


class _WireFile(_PlanFileModel):
    latency_s: Annotated[float, Field(ge=0, le=LARGEST_FIGURE)]
    bandwidth: Annotated[float, Field(ge=1 / LARGEST_FIGURE, le=LARGEST_FIGURE)]
    nodes: Annotated[int, Field(ge=1, le=MAX_SIZE)] = 1
    node_latency_s: Annotated[float, Field(ge=0, le=LARGEST_FIGURE)] = Wire.node_latency_s
    node_bandwidth: Annotated[float, Field(ge=1 / LARGEST_FIGURE, le=LARGEST_FIGURE)] = Wire.node_bandwidth


class _ZeroFile(_PlanFileModel):
    stage: Annotated[int, Field(ge=0, le=3)]
    every: Annotated[int, Field(ge=1, le=MAX_ZERO_EVERY)]


class HeadFile(_PlanFileModel):
    """Head of a plan file: all but its programs."""

    format: str
    version: FormatVersion
    mode: Literal["train", "forward"]
    schedule: _ScheduleFile
    mesh: list[tuple[Literal["dp", "pp", "tp", "cp", "ep"], Size]]
    stage_to_pp: list[PlanIndex] = Field(min_length=1)
    stage_to_part: list[PlanIndex] | None = None
    blocks_per_stage: list[PlanIndex] | None = Field(default=None, min_length=1)
    routes: list[_RouteFile] | None = None
    buckets_per_stage: Annotated[int, Field(ge=1, le=MAX_BUCKETS)]
    recompute: list[Annotated[int, Field(ge=0, le=MAX_RECOMPUTE)]] | None = None
    recompute_microbatches: list[list[PlanIndex]] | None = None
    tied: dict[str, list[PlanIndex]] | None = None
    skips: dict[str, list[PlanIndex]] | None = None
    losses: list[PlanIndex] | None = None
    communication: Means | None = None
    wire: _WireFile | None = None
    collectives: dict[str, CollectiveEntry] | None = None
    zero: _ZeroFile | None = None
    program_axes: list[Literal["pp"]] = Field(min_length=1, max_length=1)


class PlanFile(HeadFile):
    """Plan file that contains its programs."""

    programs: list[list[Any]]


AnyHead = TypeVar("AnyHead", bound=HeadFile)


def entries_of(plan: PlanData) -> dict[str, object]:
    """Return the head of a plan as JSON data, in a fixed order of keys."""
    return {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "mode": plan.mode,
        "schedule": {
            "name": plan.schedule.name,
            "microbatches": plan.schedule.microbatches,
            "chunks": plan.schedule.chunks,
            "slices": plan.schedule.slices,
            "options": dict(sorted(plan.schedule.options.items())),
        },
        "mesh": [list(axis) for axis in plan.mesh.axes],
        "stage_to_pp": list(plan.stage_to_pp),
        **({"stage_to_part": list(plan.stage_to_part)} if plan.stage_to_part is not None else {}),
        **({"blocks_per_stage": list(plan.blocks_per_stage)} if plan.blocks_per_stage else {}),
        "routes": [{"stages": list(r.stages), "microbatches": list(r.microbatches)} for r in plan.routes],
        "buckets_per_stage": plan.buckets_per_stage,
        **({"recompute": list(plan.recompute)} if any(plan.recompute) else {}),
        **({"recompute_microbatches": [list(c) for c in chosen]} if (chosen := plan.recompute_microbatches) else {}),
        **({"tied": {name: list(stages) for name, stages in sorted(plan.tied.items())}} if plan.tied else {}),
        **({"skips": {name: list(stages) for name, stages in sorted(plan.skips.items())}} if plan.skips else {}),
        **({"losses": list(plan.losses)} if plan.losses else {}),
        **_communication_entries(plan.communication),
        **({"zero": {"stage": plan.zero.stage, "every": plan.zero.every}} if plan.zero.stage else {}),
        "program_axes": ["pp"],
    }


def _communication_entries(communication: Communication) -> dict[str, object]:
    """Return the entries for the exchange of buckets; {} if it is native. The wire is stored where it is used."""
    if communication.means == "native":
        return {}
    wire = communication.wire
    several = ("nodes", "node_latency_s", "node_bandwidth") if wire.nodes > 1 else ()
    reckons = {"wire": {name: getattr(wire, name) for name in ("latency_s", "bandwidth", *several)}}
    return {
        "communication": communication.means,
        **(reckons if communication.uses_wire else {}),
        "collectives": entries(communication.plans),
    }


def read_head(data: object, form: type[AnyHead], name: str = PLAN_FORMAT) -> AnyHead:
    """Return the head of a file of the format `name`, validated; raises `InputError`."""
    if not isinstance(data, dict) or data.get("format") != name:
        raise InputError(f'/format: this is not a plan file; it must say "format": "{name}"')
    version = data.get("version")
    if type(version) is not int:
        raise InputError(f"/version: it must be a whole number; this release reads {PLAN_VERSION}")
    if version > PLAN_VERSION:
        raise InputError(f"/version: {version} is from the future; this release reads up to {PLAN_VERSION}")
    try:
        return form.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise InputError(describe_faults(error)) from error


def wellformed(plan: PlanData) -> PlanData:
    """Return the plan; raises `InputError` for the first malformation, such as an index out of range."""
    for malformation in find_malformations(plan):
        where = pointer("programs", malformation.rank, malformation.index) if malformation.rank is not None else "/"
        raise InputError(f"{where}: {malformation.message}")
    plan.remember("malformations", tuple)
    return plan


def plan_of(file: HeadFile, programs: Programs) -> PlanData:
    """Return the plan of a head and its programs; raises `InputError` for sizes that do not fit the programs."""
    if len({name for name, _ in file.mesh}) != len(file.mesh):
        raise InputError("/mesh: an axis is given twice")
    mode: Mode = file.mode
    schedule = file.schedule
    try:
        mesh = Mesh(**dict(file.mesh))
    except UsageError as error:
        raise InputError(f"/mesh: {error}") from error
    _refuse_absurd(file, len(programs.columns))
    recompute, recompute_microbatches = _recompute_of(file)
    routes = [Route(tuple(route.stages), tuple(route.microbatches)) for route in file.routes or ()]
    if file.routes is None:
        routes = [Route(tuple(range(len(file.stage_to_pp))), tuple(range(schedule.microbatches * schedule.slices)))]
    return PlanData(
        mode=mode,
        schedule=ScheduleSpec(
            schedule.name, schedule.microbatches, schedule.chunks, schedule.slices, options=schedule.options
        ),
        mesh=mesh,
        stage_to_pp=tuple(file.stage_to_pp),
        routes=tuple(routes),
        buckets_per_stage=file.buckets_per_stage,
        programs=programs,
        stage_to_part=None if file.stage_to_part is None else tuple(file.stage_to_part),
        recompute=recompute,
        tied={name: tuple(stages) for name, stages in (file.tied or {}).items()},
        skips={name: tuple(stages) for name, stages in (file.skips or {}).items()},
        losses=tuple(file.losses or ()),
        communication=_communication_of(file),
        zero=Zero(file.zero.stage, file.zero.every) if file.zero else Zero(),
        blocks_per_stage=tuple(file.blocks_per_stage or ()),
        recompute_microbatches=recompute_microbatches,
    )


def _communication_of(file: HeadFile) -> Communication:
    plans = {name: entry.collective("collectives", name) for name, entry in (file.collectives or {}).items()}
    wire = Wire() if file.wire is None else Wire(**file.wire.model_dump())
    found = Communication(file.communication or "native", plans, wire)
    if (file.wire is not None) != found.uses_wire:
        raise InputError('/wire: it belongs to "communication": "auto" or "two-level", and to no other')
    return found


def _recompute_of(file: HeadFile) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return per stage its recompute setting, () if it is 0 for all, and the microbatches that it recomputes."""
    for name in ("recompute", "recompute_microbatches"):
        given = getattr(file, name)
        if given is not None and len(given) != len(file.stage_to_pp):
            raise InputError(
                f"/{name}: it has {counted(len(given), 'value')}, but there are "
                f"{counted(len(file.stage_to_pp), 'stage')}"
            )
    recompute = tuple(file.recompute or ())
    return recompute if any(recompute) else (), tuple(map(tuple, file.recompute_microbatches or ()))


def _refuse_absurd(file: HeadFile, num_instructions: int) -> None:
    """Refuse sizes that the programs cannot fill, before any array of such a size is allocated."""
    visits = [(len(route.stages), len(route.microbatches)) for route in file.routes or ()]
    if file.routes is None:
        visits = [(len(file.stage_to_pp), file.schedule.microbatches * file.schedule.slices)]
    forwards = sum(stages * microbatches for stages, microbatches in visits)
    if max(forwards, file.schedule.microbatches * file.schedule.slices) > num_instructions:
        raise InputError(
            f"/programs: they hold {counted(num_instructions, 'instruction')}, too few for "
            f"{file.schedule.microbatches} microbatches on {counted(len(file.stage_to_pp), 'stage')}"
        )
    cells = len(file.stage_to_pp) * file.schedule.microbatches * file.schedule.slices
    if cells > MOST_CELLS:
        raise InputError(
            f"/routes: {cells} pairs of a stage and a microbatch are more than the {MOST_CELLS} that are read"
        )
