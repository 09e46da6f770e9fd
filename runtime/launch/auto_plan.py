"""Automatic choice of the plan (`parallel: auto`): a search fills in what the section leaves open, before ranks start.

    model, data, batch ──▶ sizes ─┐
    ranks, hardware               ├──▶ tune ──▶ the best that compiles ──▶ mesh, schedule, microbatches, …
    settings of the section ──────┘

Every rank runs the search itself, from the same data, and so gets the same result. On several machines, `hardware`
names a preset or one file for all of them: the measurements of each machine might differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from quintsched.errors import MisfitError, QuintschedError, UsageError
from quintsched.ir.mesh import LAID_OUT
from quintsched.plan import Plan
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.presets_and_files import find_hardware
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import duration, strategy_name
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.tuning.recommended_strategy import reasons
from quintsched.strategies.tuning.tune import Tuning, tune

from ..comm.device import find_accelerator, num_devices
from ..data import load_dataset
from ..models import model_sizes
from ..settings.allowed_setting_values import DTYPE_NAMES
from ..settings.job_file import AutoConfig, JobConfig, ParallelConfig
from .job_plan import plan_of

TRIED = 20
"""Number of the best strategies that are tried, if the first do not compile."""

KEPT = (
    "schedule",
    "chunks",
    "zero",
    "recompute",
    "buckets_per_stage",
    "communication",
    "latency_s",
    "bandwidth",
    "tied",
    "zero_every",
)
"""Settings of the plan allowed beside `auto`; the first four are searched where they are not set."""


class Chosen(NamedTuple):
    """A job with its chosen plan, and reasons."""

    job: JobConfig
    plan: Plan
    notes: tuple[str, ...]
    """Reasons, for people."""


def choose(job: JobConfig) -> Chosen:
    """Return the job with the best strategy in place of `parallel.auto`, and its plan.

    Raises `UsageError` for settings that the search does not support, `MisfitError` where nothing fits or compiles.
    """
    auto = job.parallel.auto or AutoConfig()
    _require_free(job.parallel)
    data = load_dataset(job.data).spec
    model, hardware = model_sizes(job.model, data), find_hardware(auto.hardware)
    world = world_size(job)
    found = tune(
        model, hardware, world, job.train.batch_size, model.seq, fixed=_fixed(job, model, world), top=TRIED, front=False
    )
    refusal: QuintschedError | None = None
    for candidate in found.best:
        settled = _settled(job, candidate.strategy)
        try:
            return Chosen(settled, plan_of(settled), tuple(_notes(found, candidate.strategy)))
        except QuintschedError as error:
            refusal = error
    raise MisfitError(
        f"parallel.auto: of {found.strategies:,} strategies on {world} ranks none fits {hardware.name} with "
        f"{hardware.memory_gb:g} GB" + (f" and compiles; the last one tried: {refusal}" if refusal else "")
    )


def world_size(job: JobConfig) -> int:
    """Return the number of ranks: `auto.world`, or started processes, or devices or cores of this machine."""
    if job.parallel.auto is not None and job.parallel.auto.world is not None:
        return job.parallel.auto.world
    if job.runtime.transport != "local" and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    accelerator = find_accelerator()
    return (num_devices(accelerator) if accelerator else None) or len(os.sched_getaffinity(0))


def _require_free(parallel: ParallelConfig) -> None:
    """Raise `UsageError` where the section sets what is to be chosen."""
    settled = [name for name in (*parallel.given, *(["plan"] if parallel.plan else [])) if name not in KEPT]
    if settled:
        raise UsageError(
            f"parallel.auto chooses the plan, but the section says {', '.join(settled)} too; leave out one of them "
            "(sizes of axes go into parallel.auto.axes)"
        )
    if parallel.given.get("recompute") not in (None, 0, 1):
        raise UsageError("parallel.auto knows recompute 0 and 1; leave it out, and it chooses one of them")


def _fixed(job: JobConfig, model: Model, world: int) -> dict[str, Any]:
    """Return the constraints of the search: settings of the section, and limits of the runtime and the model."""
    given = job.parallel.given
    fixed: dict[str, Any] = {
        name: given[name] for name in ("schedule", "chunks", "zero") if given.get(name) is not None
    }
    asked = given.get("recompute")
    fixed["recompute"] = ("none", "full") if asked is None else ("full" if asked else "none",)
    if "sequence_parallel" in job.parallel.model_fields_set:
        fixed["sequence_parallel"] = job.parallel.sequence_parallel
    fixed["dtype"] = DTYPE_NAMES[job.runtime.precision]
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    tensor = tuple(size for size in divisors if model.num_kv_heads % size == 0 == model.heads % size)
    able = {"tp": tensor, "cp": tuple(size for size in divisors if _is_context_size(job, model, size))}
    axes = (job.parallel.auto or AutoConfig()).axes
    wanted = {**able, **{str(axis): sizes for axis, sizes in axes.items()}}
    for axis, sizes in wanted.items():
        fixed[axis] = tuple(size for size in sizes if axis not in able or size in able[axis])
        if not fixed[axis]:
            raise UsageError(
                f"parallel.auto.axes.{axis}: {model.name} takes {axis} of {', '.join(map(str, able[axis]))}"
            )
    return fixed


def _is_context_size(job: JobConfig, model: Model, size: int) -> bool:
    """Whether the sequence divides into so many slices, of two chunks each; the heads too with ulysses."""
    heads = model.num_kv_heads if job.parallel.context == "ulysses" else 0
    return size == 1 or (model.causal and model.seq % (2 * size) == 0 == heads % size)


def _settled(job: JobConfig, strategy: Strategy) -> JobConfig:
    """Return the job with a strategy in its section `parallel`."""
    kept = job.parallel.model_dump(include=job.parallel.model_fields_set - {"auto"})
    mesh = ",".join(f"{axis}={size}" for axis in LAID_OUT if (size := getattr(strategy, axis)) > 1)
    chosen = {
        "mesh": mesh or "dp=1",
        "schedule": strategy.schedule,
        "chunks": strategy.chunks,
        "microbatches": strategy.microbatches,
        "zero": strategy.zero,
        "recompute": int(strategy.recompute == "full"),
        "sequence_parallel": strategy.sequence_parallel,
    }
    return job.model_copy(update={"parallel": ParallelConfig.model_validate({**kept, **chosen})})


def _notes(found: Tuning, strategy: Strategy) -> Iterator[str]:
    best = predict(found.model, found.hardware, strategy)
    yield f"parallel: auto: {strategy_name(strategy)}; {duration(best.step_s)} a step by prediction"
    yield from reasons(found, [best])
