"""A run whose dp follows the number of processes, so that it goes on with what machines are left, or have come.

    parallel: {mesh: "dp=4,pp=2", elastic: true}     8 processes: dp=4      4 processes: dp=2      6: dp=3

The batch of a step stays, divided by fewer replicas or more; so a resumed run goes on to the numbers of before, up to
the order of additions. All other axes are kept: they say how the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan

from ..settings.job import JobConfig


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
    axes, dp = dict(mesh.axes), {"dp": processes // replica}
    mesh = Mesh(**(axes | dp if "dp" in axes else dp | axes))
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"mesh": str(mesh)})})


class Worlds:
    """How many ranks each attempt of a run has.

        attempt 1   8 ranks, one is lost                   attempt 3   8 ranks again: what was wrong may have passed
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
        """The number of ranks of the next attempt."""
        return self._sizes[min(self._losses, len(self._sizes) - 1)]

    def ended(self, *, lost_one: bool) -> None:
        """Take in that an attempt has failed, and whether it has lost a rank."""
        before, self._newest = self._newest, self._newest_step()
        if self._losses and self._newest != before:
            self._losses = 0
        else:
            self._losses += lost_one

    def _newest_step(self) -> int | None:
        if self._saves is None:
            return None
        from ..saving.checkpoints.run_folder import saved_steps

        with suppress(InputError):
            return max((saved.step for saved in saved_steps(self._saves)), default=None)
        return None


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
