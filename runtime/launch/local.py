"""Start a job's ranks on this machine: what `quintsched run` calls.

`torchrun` itself always ends with 1 and prints a trailer; this starts the ranks through the same library
and passes on the exit code of the rank that failed first.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quintsched.errors import QuintschedError

from ..watch.hub import Hub
from . import worker

if TYPE_CHECKING:
    from ..job.config import JobConfig

DIED = 4
VERDICT_S = 5.0
"""How long the launcher waits for the verdict when all ranks have ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of the job's mesh (or `--nproc` of them) and return their exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    known, rest = parser.parse_known_args(arguments)
    try:
        num_ranks, in_process, more = _ranks(worker.parse(rest), known.nproc)
    except QuintschedError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    given = [*rest, *more]
    return worker.main(given) if in_process else start_ranks(num_ranks, "quintsched.runtime", given)


def _ranks(arguments: argparse.Namespace, wanted: int | None) -> tuple[int, bool, list[str]]:
    """Return how many ranks to start, whether this process can run them itself, and what they are told besides."""
    from ..job.jobfile import load_job
    from .to_plan import plan_of

    job = load_job(arguments.config, arguments.set)
    more: list[str] = []
    if job.parallel.auto is not None and arguments.plan is None:
        from .auto import world_size

        _measure_first(job)
        num_ranks = wanted or world_size(job)
        more = ["--set", f"parallel.auto.world={num_ranks}"]
    else:
        num_ranks = wanted or plan_of(job, arguments.plan).mesh.size
    return num_ranks, job.runtime.transport == "local" or num_ranks == 1, more


def _measure_first(job: JobConfig) -> None:
    """Measure this machine, once for all ranks, where the job's choice needs that and it was never done."""
    from quintsched.descriptions.library import CALIBRATED

    file = CALIBRATED.expanduser()
    if job.parallel.auto is None or job.parallel.auto.hardware != "cpu" or file.is_file():
        return
    sys.stderr.write(f"measuring this machine, up to a minute, into {file} (again: quintsched calibrate)\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "quintsched.runtime.calibrate", str(file)], check=False)


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run a module on so many ranks, a process each; return the exit code of the rank that failed first, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    hub = Hub(num_ranks, tell=lambda verdict: _say(verdict.message))
    os.environ.update(hub.environment)
    hub.start()
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        for rank, each in failed.failures.items():
            hub.ended(rank, each.exitcode)
        verdict = hub.wait(VERDICT_S)
        if verdict is not None:
            return verdict.exit_code
        return failure.exitcode if failure.exitcode > 0 else DIED
    except (KeyboardInterrupt, SignalException):
        return 130
    finally:
        hub.close()
    return 0


def _say(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
