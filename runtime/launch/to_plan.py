"""From a job file to a plan: the `parallel` section compiled, or the plan given beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quintsched.compiler import compile_request, stages_of
from quintsched.errors import MisfitError, UsageError
from quintsched.ir.plan_data import listed
from quintsched.plan import Plan
from quintsched.request import CompileRequest, entries
from quintsched.user_code import names_file

from ..settings.job import JobConfig, ParallelConfig


def plan_of(job: JobConfig, plan_path: str | Path | None = None) -> Plan:
    """Return the plan of a job: the one at `plan_path`, that of `parallel.plan`, or a compiled one.

    A plan file wins over the `parallel` section. Raises `MisfitError` where a setting that the job file gives says
    something else than the plan, or the batch does not divide; `UsageError` where stages are to be balanced that the
    plan has settled; errors of loading and compiling as they come.
    """
    path = plan_path or job.parallel.plan
    if path is None:
        plan = compile_request(_request(job))
    else:
        plan = Plan.load(path)
        _require_agreement(job.parallel, plan, str(path))
    _require_even_batch(job.train.batch_size, job.train.accumulate, plan)
    _require_one_cut(job.parallel, plan)
    return plan


def _request(job: JobConfig) -> CompileRequest:
    """Return what the job asks for, with what a built-in model ties: weights of its first block and its last."""
    request = job.parallel.request()
    if request.tied or names_file(job.model.name) or not (job.model.tied or job.model.options.get("tied")):
        return request
    from ..models import tied_weights

    held = request.stages or (1,) * len(stages_of(request))
    last = max((stage for stage, blocks in enumerate(held) if blocks), default=0)
    return replace(request, tied=dict.fromkeys(tied_weights(job.model), (0, last))) if last else request


def _require_agreement(parallel: ParallelConfig, plan: Plan, path: str) -> None:
    """Raise `MisfitError` where a setting that the job names is another one in the plan."""
    found = {
        entry.name: entry.difference(getattr(parallel, entry.name), plan)
        for entry in entries()
        if entry.name in parallel.given
    }
    odd = [f"{name} is {both[0]} in the job file but {both[1]} in the plan" for name, both in found.items() if both]
    if odd:
        raise MisfitError(f"{path} disagrees with the job's parallel section: {'; '.join(odd)}; change one of them")


def _require_even_batch(batch_size: int, accumulate: int, plan: Plan) -> None:
    count = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep") * plan.schedule.microbatches * accumulate
    what = "the plan's replicas x microbatches" + (" x train.accumulate" if accumulate > 1 else "")
    if batch_size % count:
        below = batch_size // count * count
        nearest = f"{below} or {below + count}" if below else str(count)
        raise MisfitError(
            f"train.batch_size {batch_size} does not divide into {count} equal microbatches ({what}); the nearest that "
            f"do: {nearest}"
        )


def _require_one_cut(parallel: ParallelConfig, plan: Plan) -> None:
    """Raise `UsageError` where the job wants stages balanced, and the plan says what they are."""
    if plan.blocks_per_stage and parallel.balance == "measured":
        raise UsageError(
            f"parallel.balance is measured, but the plan says how many blocks each stage has "
            f"({listed(plan.blocks_per_stage)}); leave out one of them, balance or stages"
        )
