"""A run whose dp follows the number of processes, so that it goes on with what machines are left, or have come.

    parallel: {mesh: "dp=4,pp=2", elastic: true}     8 processes: dp=4      4 processes: dp=2      6: dp=3

The batch of a step stays, divided by fewer replicas or more; so a resumed run goes on to the numbers of before, up to
the order of additions. All other axes are kept: they say how the model is cut.
"""

from __future__ import annotations

from quintsched.errors import MisfitError, UsageError
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan

from ..job.config import JobConfig


def for_processes(job: JobConfig, plan_path: str | None, processes: int) -> JobConfig:
    """Return an elastic job with the dp that so many processes make; any other job as it is.

    Raises `UsageError` for an elastic job with a plan, or whose mesh is chosen; `MisfitError` for processes that make
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
            f"{processes} processes make no whole replicas of {replica} ranks, as parallel.mesh {mesh} has them; start "
            f"{processes // replica * replica or replica}"
        )
    return _with_mesh(job, _with_dp(mesh, processes // replica))


def smaller_worlds(job: JobConfig, plan: Plan, min_dp: int, machines: int = 1) -> list[int]:
    """Return with how many ranks a job can run, from those of its plan down to those of `min_dp` replicas.

    So many of each machine, and replicas that divide the batch.
    """
    dp = plan.mesh.axis_size("dp")
    replica, batch = plan.mesh.size // dp, job.train.batch_size
    parts = plan.mesh.axis_size("ep") * plan.schedule.microbatches * job.train.accumulate
    return [
        fewer * replica
        for fewer in range(dp, min(min_dp, dp) - 1, -1)
        if batch % (fewer * parts) == 0 and fewer * replica % machines == 0
    ]


def _with_dp(mesh: Mesh, dp: int) -> Mesh:
    axes = dict(mesh.axes)
    return Mesh(**(axes | {"dp": dp} if "dp" in axes else {"dp": dp} | axes))


def _with_mesh(job: JobConfig, mesh: Mesh) -> JobConfig:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"mesh": str(mesh)})})
