"""Start a job's ranks on this machine: what `quintsched run` calls.

`torchrun` itself always ends with 1 and prints a trailer; this starts the ranks through the same library
and passes on the exit code of the rank that failed first.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Sequence

from quintsched.errors import QuintschedError

from . import worker

DIED = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of the job's mesh (or `--nproc` of them) and return their exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    known, rest = parser.parse_known_args(arguments)
    try:
        num_ranks, in_process = _ranks(worker.parse(rest), known.nproc)
    except QuintschedError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return worker.main(rest) if in_process else _launch(num_ranks, rest)


def _ranks(arguments: argparse.Namespace, wanted: int | None) -> tuple[int, bool]:
    """Return how many ranks to start, and whether this process can run them itself."""
    from ..job.jobfile import load_job
    from .to_plan import plan_of

    job = load_job(arguments.config, arguments.set)
    num_ranks = wanted or plan_of(job, arguments.plan).mesh.size
    return num_ranks, job.runtime.transport == "local" or num_ranks == 1


def _launch(num_ranks: int, arguments: Sequence[str]) -> int:
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
    try:
        elastic_launch(config, sys.executable)("-m", "quintsched.runtime", *arguments)
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else DIED
    except (KeyboardInterrupt, SignalException):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
