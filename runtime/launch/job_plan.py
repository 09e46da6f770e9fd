"""Plan of a job file: its `parallel` section compiled, or a plan file.

Also elastic runs, whose dp follows the number of processes, so that a run resumes on more or fewer machines.

    parallel: {mesh: "dp=4,pp=2", elastic: true}     8 processes: dp=4      4 processes: dp=2      6: dp=3

The batch of a step stays, divided by fewer replicas or more; so a resumed run has the same numbers as before, up to
the order of additions. All other axes are kept: they say how the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from quintsched.check_call_arguments import PATH, ours, takes
from quintsched.compiler import compile_request, evaluation_of, stages_of
from quintsched.errors import InputError, MisfitError, UsageError, counted
from quintsched.files.atomic import whole_path
from quintsched.import_user_code import names_file
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import listed
from quintsched.plan import Plan
from quintsched.request import CompileRequest, entries

from ..settings.job_file import JobConfig, ParallelConfig


@takes("plan_of(load_job(path))", job=ours("JobConfig"), plan_path=PATH)
def plan_of(job: JobConfig, plan_path: str | Path | None = None) -> Plan:
    """Return the plan of a job: the one at `plan_path`, that of `parallel.plan`, or a compiled one.

    A plan file wins over the `parallel` section. Raises `MisfitError` where a setting that the job file gives says
    something else than the plan, or the batch does not divide; `UsageError` where stages are to be balanced that the
    plan has settled; errors of loading and compiling as they come. A forward run has the plan that evaluates what the
    plan trains, or a plan that only runs forward as it is.
    """
    path = plan_path or job.parallel.plan
    if path is None:
        plan = compile_request(request_of(job))
    else:
        plan = Plan.load(path)
        _require_agreement(job.parallel, plan, str(path))
    _require_one_cut(job.parallel, plan)
    if job.mode == "forward":
        _require_outputs(job)
        return evaluation_of(plan)
    _require_even_batch(job.train.batch_size, job.train.accumulate, plan)
    return plan


def _require_outputs(job: JobConfig) -> None:
    """Raise `UsageError` for a forward run that writes nothing, or is to be traced as a training."""
    if job.forward.outputs is None:
        raise UsageError("mode: forward writes outputs; say where: forward: {outputs: DIR}, --set forward.outputs=DIR")
    if job.checkpoint.dir is not None and whole_path(job.checkpoint.dir) == whole_path(job.forward.outputs):
        raise UsageError(f"forward.outputs is the checkpoint.dir, {job.forward.outputs}; give outputs their own folder")
    if job.runtime.trace is not None:
        raise UsageError("runtime.trace writes down steps of a training, which mode: forward has not; leave it out")


def request_of(job: JobConfig) -> CompileRequest:
    """Return the job's compile request, with the ties of a built-in model: weights of its first block and its last."""
    request = job.parallel.request()
    if request.tied or names_file(job.model.name) or not (job.model.tied or job.model.options.get("tied")):
        return request
    from ..models import tied_weights

    held = request.stages or (1,) * len(stages_of(request))
    last = max((stage for stage, blocks in enumerate(held) if blocks), default=0)
    return replace(request, tied=dict.fromkeys(tied_weights(job.model), (0, last))) if last else request


def _require_agreement(parallel: ParallelConfig, plan: Plan, path: str) -> None:
    """Raise `MisfitError` where a setting that the job names differs from the plan's."""
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
            f"train.batch_size {batch_size} does not divide into {counted(count, 'equal microbatch')} ({what}); the "
            f"nearest that do: {nearest}"
        )


def _require_one_cut(parallel: ParallelConfig, plan: Plan) -> None:
    """Raise `UsageError` where the job asks for measured balancing, and the plan fixes the stages."""
    if plan.blocks_per_stage and parallel.balance == "measured":
        raise UsageError(
            f"parallel.balance is measured, but the plan says how many blocks each stage has "
            f"({listed(plan.blocks_per_stage)}); leave out one of them, balance or stages"
        )


def for_processes(job: JobConfig, plan_path: str | None, processes: int) -> JobConfig:
    """Return an elastic job with the dp that so many processes make; any other job as it is.

    Raises `UsageError` for an elastic job with a plan, or with `auto`; `MisfitError` for processes that make
    no whole replicas.
    """
    if not job.parallel.elastic or job.runtime.transport == "local":
        return job
    if plan_path is not None or job.parallel.plan is not None or job.parallel.auto is not None:
        raise UsageError(
            "parallel.elastic compiles a plan for the processes that there are; leave out the plan, or auto"
        )
    mesh = Mesh.parse(job.parallel.request().mesh)
    replica = mesh.size // mesh.axis_size("dp")
    if processes % replica:
        raise MisfitError(
            f"{counted(processes, 'process')} make no whole replica of {counted(replica, 'rank')}, as parallel.mesh "
            f"{mesh} has them; start {processes // replica * replica or replica}"
        )
    axes, dp = dict(mesh.axes), {"dp": processes // replica}
    mesh = Mesh(**(axes | dp if "dp" in axes else dp | axes))
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"mesh": str(mesh)})})


class Worlds:
    """Number of ranks of each attempt of a run.

        attempt 1   8 ranks, one is lost                   attempt 3   8 ranks again: the fault may have passed
        attempt 2   6 ranks, a step is saved, one is lost  attempt 4   6 ranks, if the third saved nothing

    Args:
        sizes: of the first attempt, and of those after so many that have lost a rank; the last counts for all further.
        saves: the folder of the run's checkpoints; None: attempts never have more ranks than those before.
    """

    def __init__(self, sizes: Sequence[int], saves: Path | None = None) -> None:
        self._sizes, self._saves = sizes, saves
        self._losses, self._newest = 0, self._newest_step()

    @property
    def size(self) -> int:
        """Number of ranks of the next attempt."""
        return self._sizes[min(self._losses, len(self._sizes) - 1)]

    def ended(self, *, lost_one: bool) -> None:
        """Record that an attempt has failed, and whether it has lost a rank."""
        before, self._newest = self._newest, self._newest_step()
        if self._losses and self._newest != before:
            self._losses = 0
        else:
            self._losses += lost_one

    def _newest_step(self) -> int | None:
        if self._saves is None:
            return None
        from ..saving.checkpoints.atomic_run_folder import saved_steps

        with suppress(InputError):
            return max((saved.step for saved in saved_steps(self._saves)), default=None)
        return None


def smaller_worlds(job: JobConfig, plan: Plan, min_dp: int, machines: int = 1) -> list[int]:
    """Return the numbers of ranks that a job can run with, from those of its plan down to those of `min_dp` replicas.

    Each is divisible by the number of machines, and has replicas that divide the batch.
    """
    dp = plan.mesh.axis_size("dp")
    replica, batch = plan.mesh.size // dp, job.train.batch_size
    parts = plan.mesh.axis_size("ep") * plan.schedule.microbatches * job.train.accumulate
    return [
        fewer * replica
        for fewer in range(dp, min(min_dp, dp) - 1, -1)
        if batch % (fewer * parts) == 0 and fewer * replica % machines == 0
    ]
