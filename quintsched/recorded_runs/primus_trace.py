"""Traces of Primus (AMD), a pipeline of Megatron: `dump_pp_data` writes one file per rank.

    config.json      {"pp_size": 8, "vp_size": 1, "num_mbs": 16, …}
    pp_rank_0.json   {"1": {"fwd_start": […], "fwd_end": […], "bwd_start": …, "wgrad_start": …}, …}     steps, in ms

The k-th entry of a list is the k-th of its kind that the rank has computed. Its microbatch and chunk are in lists
beside it (`fwd_minibatch`, `fwd_chunk`), or follow from Megatron's order: of several chunks, pp microbatches of each in
turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from quintsched.compiler import compile
from quintsched.errors import InputError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import describe_faults, parse_strict
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.ir.mesh import Mesh
from quintsched.recorded_runs.recorded_run import ComputedSpan, RecordedRun, RecordedStep, Rows, recorded_run
from quintsched.schedules.kit.given_order import schedule_of_rows
from quintsched.schedules.kit.stage_placements import loop, v

CONFIG = "config.json"
MOST_BYTES = 2**28
MOST = 2**16
Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]
Times = list[Annotated[float, Field(allow_inf_nan=False)]]
Numbers = list[Annotated[int, Field(ge=0, strict=True)]]


class _PrimusConfig(BaseModel):
    pp_size: Count
    vp_size: Count = Field(default=1, validation_alias=AliasChoices("vp_size", "vpp_size"))
    num_mbs: Count = Field(validation_alias=AliasChoices("num_mbs", "micro_batches"))


class _PrimusStep(BaseModel):
    model_config = ConfigDict(extra="ignore")

    fwd_start: Times
    fwd_end: Times
    fwd_minibatch: Numbers = []
    fwd_chunk: Numbers = []
    bwd_start: Times
    bwd_end: Times
    bwd_minibatch: Numbers = []
    bwd_chunk: Numbers = []
    wgrad_start: Times = []
    wgrad_end: Times = []
    wgrad_minibatch: Numbers = []
    wgrad_chunk: Numbers = []


_STEPS = TypeAdapter(dict[str, _PrimusStep])

Record = TypeVar("Record")
Place = tuple[str, int, int]
"""Kind of a computation ("fwd", "bwd" or "wgrad"), its chunk and its microbatch."""


def is_primus(directory: Path) -> bool:
    """Return whether a directory has such a trace."""
    return (directory / CONFIG).exists() and any(directory.glob(_name("*")))


def load_primus(directory: Path) -> RecordedRun:
    """Read such a trace; raises `InputError` for a broken one."""
    config = _read(directory / CONFIG, TypeAdapter(_PrimusConfig))
    files = [directory / _name(rank) for rank in range(config.pp_size)]
    ranks = [_read(file, _STEPS) for file in files]
    numbers = ranks[0].keys()
    for file, steps in zip(files, ranks, strict=True):
        if steps.keys() != numbers or not all(name.isdigit() for name in numbers) or not steps:
            raise InputError(f"{file}: its steps are not numbers, or not those of {_name(0)}")
    timed = [
        [_timed(steps[number], config, file) for steps, file in zip(ranks, files, strict=True)] for number in numbers
    ]
    placement = _placement(timed[-1], config)
    found = [
        RecordedStep(int(n), _rows(step, placement, config.pp_size)) for n, step in zip(numbers, timed, strict=True)
    ]
    rows = [[span.instruction for span in row] for row in found[0].rows]
    schedule = schedule_of_rows(rows, placement, config.pp_size, "recorded")
    plan = compile(schedule, mesh=Mesh(pp=config.pp_size), microbatches=config.num_mbs, chunks=config.vp_size)
    return recorded_run("Primus", plan, found)


def _name(rank: int | str) -> str:
    return f"pp_rank_{rank}.json"


def _read(path: Path, kind: TypeAdapter[Record]) -> Record:
    try:
        return kind.validate_python(parse_strict(read_whole(path, MOST_BYTES, "the trace")))
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _timed(step: _PrimusStep, config: _PrimusConfig, file: Path) -> list[tuple[float, float, Place]]:
    """Return start, end and place of a rank's computations, by start."""
    found = []
    for kind in ("fwd", "bwd", "wgrad"):
        starts, ends, microbatches, chunks = (
            getattr(step, f"{kind}_{name}") for name in ("start", "end", "minibatch", "chunk")
        )
        places = list(_megatron_order(kind, config))
        if kind == "wgrad" and not starts:
            continue
        if microbatches and len(microbatches) == len(places):
            places = list(zip(chunks or [0] * len(places), microbatches, strict=False))
        expected = sorted(product(range(config.vp_size), range(config.num_mbs)))
        if not len(starts) == len(ends) == len(places) or sorted(places) != expected:
            raise InputError(f"{file}: /{kind}_start: not one entry for each chunk and microbatch")
        found += [(start, end, (kind, *place)) for start, end, place in zip(starts, ends, places, strict=True)]
    return sorted(found)


def _megatron_order(kind: str, config: _PrimusConfig) -> Iterator[tuple[int, int]]:
    """Yield chunk and microbatch in Megatron's order; backwards visit chunks from the last on."""
    chunks = range(config.vp_size) if kind == "fwd" else range(config.vp_size)[::-1]
    every = range(config.num_mbs)
    for first in range(0, config.num_mbs, config.pp_size) if config.vp_size > 1 else (0,):
        group = every[first : first + config.pp_size] if config.vp_size > 1 else every
        yield from product(chunks, group)


def _placement(step: Sequence[list[tuple[float, float, Place]]], config: _PrimusConfig) -> tuple[int, ...]:
    """Return the placement in which inputs are computed before they are used: Megatron's loop, or else a V."""
    sizes = config.pp_size, config.vp_size
    if config.vp_size == 1:
        return loop(*sizes)
    return min((loop(*sizes), v(*sizes)), key=lambda placed: _too_early(_rows(step, placed, config.pp_size)))


def _too_early(rows: Rows) -> float:
    """Return the sum of times by which forwards begin before those of the stage before have ended."""
    spans = {span.instruction: span for row in rows for span in row if isinstance(span.instruction, Fwd)}
    pairs = ((span, spans.get(Fwd(i.stage - 1, i.microbatch))) for i, span in spans.items())
    return sum(max(0.0, before.end - span.start) for span, before in pairs if before is not None)


def _rows(step: Sequence[list[tuple[float, float, Place]]], placement: tuple[int, ...], pp: int) -> Rows:
    stages = [[stage for stage, at in enumerate(placement) if at == rank] for rank in range(pp)]
    kinds: list[dict[str, type[Compute]]] = []
    for row in step:
        is_split = any(kind == "wgrad" for _, _, (kind, _, _) in row)
        kinds.append({"fwd": Fwd, "bwd": BwdInput if is_split else Bwd, "wgrad": BwdWeight})
    return tuple(
        tuple(
            ComputedSpan(kinds[rank][kind](stages[rank][chunk], microbatch), start, end)
            for start, end, (kind, chunk, microbatch) in row
        )
        for rank, row in enumerate(step)
    )
