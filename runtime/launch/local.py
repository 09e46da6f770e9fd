"""Start a job's ranks on this machine: what `quintsched run` calls.

    listen at 127.0.0.1 ─▶ start the ranks ─▶ serve their store ─▶ supervise ─▶ exit code
                                ▲                                      │ failed, and may be started again
                                └──────────────────────────────────────┘

Unlike torchrun, which ends with 1 whatever its processes end with, this passes on the exit code of the rank that failed
first, listens nowhere but on the loopback interface, and unpickles nothing.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quintsched.errors import QuintschedError

from ..rendezvous.addresses import LOOPBACK, listen
from . import worker
from .processes import Place, Ranks, taking_signals
from .supervise import supervise
from .watching import note_end, watching

if TYPE_CHECKING:
    from ..job.config import JobConfig

STORE_WAITS_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of the job's mesh (or `--nproc` of them) and return the exit code of the run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    known, rest = parser.parse_known_args(arguments)
    try:
        num_ranks, in_process, more = _ranks(worker.parse(rest), known.nproc)
    except QuintschedError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    given = [*rest, *more]
    if in_process and not known.restarts:
        return worker.main(given)
    return start_ranks(1 if in_process else num_ranks, "quintsched.runtime", given, known.restarts)


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


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str], restarts: int = 0) -> int:
    """Run a module on so many ranks of this machine, a process each; return the exit code of the run.

    That is 0, or the code of the rank that failed first; 128 + n where signal n ended the run before it could stop.
    After a failure all ranks are started again, up to `restarts` times, unless it is one that would come again.
    """
    listener = listen(LOOPBACK)
    place = Place(LOOPBACK, listener.getsockname()[1], uuid.uuid4().hex, num_ranks)
    store: object = None
    with taking_signals() as wakes:
        for attempt in range(restarts + 1):
            with watching(num_ranks) as hub, Ranks(place, [module, *arguments], attempt, restarts) as ranks:
                store = store or _serve(listener)
                ended = supervise(ranks, wakes, partial(note_end, hub))
            if hub.verdict is not None:
                ended = replace(ended, code=hub.verdict.exit_code)
            if ended.is_final or attempt == restarts:
                break
            _say(f"the run ended with exit code {ended.code}; starting it again: restart {attempt + 1} of {restarts}")
    return ended.code


def _serve(listener: socket.socket) -> object:
    """Serve the store, for as long as what is returned is kept. Torch is imported while the ranks import it too."""
    from ..rendezvous.store import serve

    return serve(listener, STORE_WAITS_S)


if __name__ == "__main__":
    sys.exit(main())
