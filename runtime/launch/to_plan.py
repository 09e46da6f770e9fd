"""From a job file to a plan: the `parallel` section compiled, or the plan given beside it."""

from __future__ import annotations

from pathlib import Path

from quintsched.collectives import Wire
from quintsched.compiler import compile
from quintsched.errors import MisfitError
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan
from quintsched.schedules import find_schedule
from quintsched.user_code import names_file

from ..job.config import JobConfig, ParallelConfig


def plan_of(job: JobConfig, plan_path: str | Path | None = None) -> Plan:
    """Return the plan of a job: the one at `plan_path`, that of `parallel.plan`, or a compiled one.

    A plan file wins over the `parallel` section. Raises `MisfitError` where a setting that the job file gives says
    something else than the plan, or the batch does not divide; errors of loading and compiling as they come.
    """
    parallel = job.parallel
    path = plan_path or parallel.plan
    if path is None:
        plan = compile(
            parallel.schedule,
            mesh=Mesh.parse(parallel.mesh),
            microbatches=parallel.microbatches,
            chunks=parallel.chunks if "chunks" in parallel.model_fields_set else None,
            slices=parallel.slices,
            recompute=parallel.recompute,
            tied=parallel.tied or _first_and_last(job),
            communication=parallel.communication,
            wire=Wire(parallel.latency_s, parallel.bandwidth),
            zero=parallel.zero,
            zero_every=parallel.zero_every,
        )
    else:
        plan = Plan.load(path)
        _require_agreement(parallel, plan, str(path))
    _require_even_batch(job.train.batch_size, plan)
    return plan


def _first_and_last(job: JobConfig) -> dict[str, tuple[int, ...]]:
    """Return what the plan must tie for a built-in model: weights of its first block and its last, if apart."""
    if names_file(job.model.name) or not (job.model.tied or job.model.options.get("tied")):
        return {}
    from ..models import tied_weights

    parallel = job.parallel
    chunks = parallel.chunks if "chunks" in parallel.model_fields_set else None
    schedule = find_schedule(parallel.schedule)
    stages = schedule.shape(Mesh.parse(parallel.mesh).pp, parallel.microbatches, chunks, parallel.slices).stage_to_pp
    return dict.fromkeys(tied_weights(job.model), (0, len(stages) - 1)) if len(stages) > 1 else {}


def _require_agreement(parallel: ParallelConfig, plan: Plan, path: str) -> None:
    said: dict[str, object] = {
        "mesh": Mesh.parse(parallel.mesh),
        "schedule": parallel.schedule,
        "microbatches": parallel.microbatches,
        "chunks": parallel.chunks,
        "slices": parallel.slices,
        "recompute": _per_stage(parallel.recompute, plan),
        "tied": parallel.tied,
        "communication": parallel.communication,
        "zero": parallel.zero,
        "zero_every": parallel.zero_every,
    }
    has: dict[str, object] = {
        "mesh": plan.mesh,
        "schedule": plan.schedule.name,
        "microbatches": plan.schedule.microbatches,
        "chunks": plan.schedule.chunks,
        "slices": plan.schedule.slices,
        "recompute": tuple(plan.layout.recompute_every(stage) for stage in range(len(plan.stage_to_pp))),
        "tied": dict(plan.tied),
        "communication": plan.communication.means,
        "zero": plan.zero.stage,
        "zero_every": plan.zero.every,
    }
    odd = [
        f"{key} is {said[key]} in the job file but {has[key]} in the plan"
        for key in said
        if key in parallel.model_fields_set and said[key] != has[key]
    ]
    if odd:
        raise MisfitError(f"{path} disagrees with the job's parallel section: {'; '.join(odd)}; change one of them")


def _per_stage(recompute: int | tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    return (recompute,) * len(plan.stage_to_pp) if isinstance(recompute, int) else recompute


def _require_even_batch(batch_size: int, plan: Plan) -> None:
    count = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep") * plan.schedule.microbatches
    if batch_size % count:
        below = batch_size // count * count
        nearest = f"{below} or {below + count}" if below else str(count)
        raise MisfitError(
            f"train.batch_size {batch_size} does not divide into {count} equal microbatches (the plan's replicas x "
            f"microbatches); the nearest that do: {nearest}"
        )
