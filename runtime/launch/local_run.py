"""Launcher of a job's ranks on this machine: the main of `quintsched run`.

    listen at 127.0.0.1 ─▶ start the ranks ─▶ serve their store ─▶ supervise ─▶ exit code
                                ▲                                      │ failed, and may be started again
                                └──────────────────────────────────────┘

Unlike torchrun, which ends with 1 whatever its processes end with, this returns the exit code of the rank that failed
first, listens on the loopback interface only, and unpickles nothing.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quintsched.errors import MisfitError, QuintschedError, UsageError, counted
from quintsched.files.atomic import writing
from quintsched.files.terminal import write_error, write_line
from quintsched.import_user_code import file_of, names_file

from ..settings.job_file import overrides_of
from ..watch.rendezvous.fork_server import ForkServer
from ..watch.rendezvous.network_addresses import (
    LOOPBACK,
    listen,
    own_address,
    read_master,
    require_elsewhere,
    require_interfaces,
)
from . import worker
from .job_plan import Worlds, for_processes, smaller_worlds
from .run_arguments import LaunchRequest, read_request
from .start_and_stop_rank_processes import MachineRanks, RankProcesses, taking_signals
from .stop_signals import STOPPING
from .supervise import DIED, Machines, note_end, supervise, wait_for_machines, watching

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from ..settings.job_file import JobConfig

RANK = "quintsched.runtime"
"""Module that a rank runs."""
PRELOADED = ("quintsched.runtime.train.trainer", "quintsched.runtime.train.forward_run", "torch._dynamo")
"""Modules that it imports in any case: torch's optimizers ask for the last one."""
OF_TRANSFORMERS = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.masking_utils")
"""Modules that models of transformers import, where the user's file names that library."""

STORE_WAITS_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of the job's mesh (or `--nproc` of them) and return the exit code of the run."""
    request = read_request(LaunchRequest, sys.argv[1:] if argv is None else argv)
    try:
        if request.min_dp is not None:
            request = request.with_set(overrides_of("parallel", elastic=True))
        require_interfaces()
        worlds, in_process, request = _worlds(request)
        job = request.load_job()
        _make_folders(job, request.node_rank)
        command, preloaded = [RANK, request.to_ranks()], preloaded_for(job)
        if request.nnodes > 1:
            place, listener = _place_of(request, worlds.size)
            return start_here(place, command, request.restarts, listener, worlds, preloaded)
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    if in_process and not request.restarts:
        return worker.main(command[1:])
    return start_ranks(Worlds([1]) if in_process else worlds, command[0], command[1:], request.restarts, preloaded)


def preloaded_for(job: JobConfig) -> tuple[str, ...]:
    """Return the modules that ranks of a job import, of torch, the runtime, and transformers."""
    files = [Path(file_of(name)) for name in (job.model.name, job.data.name) if names_file(name)]
    wants_transformers = any(b"transformers" in file.read_bytes() for file in files if file.is_file())
    return (*PRELOADED, *OF_TRANSFORMERS) if wants_transformers else PRELOADED


def _worlds(request: LaunchRequest) -> tuple[Worlds, bool, LaunchRequest]:
    """Return the number of ranks to start, and of those after losses; whether this process can run them itself; and
    the request for the ranks, with what is decided here for all of them.
    """
    from .job_plan import plan_of

    job, wanted = request.load_job(), request.nproc and request.nproc * request.nnodes
    job = for_processes(job, request.plan, wanted) if wanted else job
    if job.parallel.auto is not None and request.plan is None:
        from .auto_plan import world_size

        _measure_first(job)
        num_ranks = wanted or world_size(job)
        request = request.with_set(overrides_of("parallel", "auto", world=num_ranks))
    else:
        num_ranks = wanted or plan_of(job, request.plan).mesh.size
    worlds = Worlds([num_ranks])
    if request.min_dp is not None:
        saves = job.checkpoint.folder if request.nnodes == 1 else None  # launchers elsewhere may not see the same
        sizes = smaller_worlds(job, plan_of(job), request.min_dp, request.nnodes) or [num_ranks]
        worlds = Worlds(sizes, saves)
    # processes that are asked for are started also where ranks are threads of one: they refuse to run such a job
    return worlds, num_ranks == 1 or (job.runtime.transport == "local" and wanted is None), request


def _make_folders(job: JobConfig, node: int) -> None:
    """Make the folders of the log and of checkpoints: one that cannot be made is an error before any rank starts."""
    log = None if job.log.path is None else Path(job.log.path).parent
    for folder, what in ((log, "the log"), (job.checkpoint.folder, "a checkpoint")):
        if folder is not None and node == 0:
            with writing(folder, what):
                folder.mkdir(parents=True, exist_ok=True)


def _measure_first(job: JobConfig) -> None:
    """Measure this machine, once for all ranks, where `auto` needs its costs and no file has them."""
    from quintsched.strategies.descriptions.presets_and_files import calibrated_file

    file = calibrated_file()
    if job.parallel.auto is None or job.parallel.auto.hardware != "cpu" or file.is_file():
        return
    write_line(f"measuring this machine, up to a minute, into {file} (again: quintsched calibrate)")
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "quintsched.runtime.calibrate", str(file)], check=False)


def start_ranks(
    worlds: Worlds, module: str, arguments: Sequence[str], restarts: int = 0, preloaded: Sequence[str] = ()
) -> int:
    """Run a module on ranks of this machine, a process each; return the exit code of the run.

    `worlds` has the number of ranks of each attempt, `preloaded` modules that are imported once for all ranks. The exit
    code is 0, or that of the rank that failed first; 128 + n where signal n ended the run before it could stop.
    After a failure all ranks are started again, up to `restarts` times, unless the error would recur.
    """
    listener = listen(LOOPBACK)
    place = MachineRanks(LOOPBACK, listener.getsockname()[1], worlds.size)
    return start_here(place, [module, *arguments], restarts, listener, worlds, preloaded)


def start_here(
    place: MachineRanks,
    command: Sequence[str],
    restarts: int,
    listener: socket.socket | None,
    worlds: Worlds,
    preloaded: Sequence[str] = (),
) -> int:
    """Start this machine's ranks, and return the run's exit code; the launcher that has `listener` serves the store."""
    module, *arguments = command
    with ForkServer(module, preloaded, STOPPING) as server, taking_signals(server) as wakes:
        store = _serve(listener)
        for attempt in range(restarts + 1):
            place = replace(place, num_ranks=worlds.size // place.num_nodes)
            with watching(place) as hub, RankProcesses(place, server, arguments, attempt, restarts) as ranks:
                machines = _machines(place, store, attempt)
                ended = supervise(ranks, wakes, machines, partial(note_end, hub, machines))
                if hub is not None:
                    hub.stop()  # the launcher itself ends the ranks that are left
            if hub is not None and hub.verdict is not None and not ended.by_signal:
                is_final = hub.verdict.comes_again or ended.was_asked
                ended = replace(ended, code=hub.verdict.exit_code, is_final=is_final)
            if machines is not None:
                ended = wait_for_machines(wakes, machines, ended)
            if ended.is_final or attempt == restarts:
                break
            worlds.ended(lost_one=ended.code == DIED)
            write_line(
                f"the run ended with exit code {ended.code}; starting it again: restart {attempt + 1} of {restarts}"
            )
    return ended.code


def _serve(listener: socket.socket | None) -> Store | None:
    """Serve the run's store for as long as it is referenced; torch is imported while the fork server imports it too."""
    from ..watch.rendezvous.rendezvous_store import serve

    return None if listener is None else serve(listener, STORE_WAITS_S)


def _machines(place: MachineRanks, store: Store | None, attempt: int) -> Machines | None:
    if place.num_nodes == 1:
        return None
    from ..watch.rendezvous.rendezvous_store import connect_to

    connect = partial(connect_to, place.host, place.port, STORE_WAITS_S)
    return Machines((lambda: store) if store is not None else connect, place.node, place.num_nodes, attempt)


def _place_of(request: LaunchRequest, num_ranks: int) -> tuple[MachineRanks, socket.socket | None]:
    """Return the place of this machine's ranks among those of all machines; machine 0 listens for them all.

    Raises `UsageError` for invalid command-line values, `MisfitError` for ranks that the machines cannot share evenly.
    """
    count, number = request.nnodes, request.node_rank
    host, port = read_master(request.master)
    said = f"--master {request.master}"
    if not 0 <= number < count:
        raise UsageError(f"--node-rank {number}: the machines are 0 to {count - 1}")
    if num_ranks % count:
        raise MisfitError(f"{counted(num_ranks, 'rank')} cannot be shared out evenly over {counted(count, 'machine')}")
    if number > 0:
        require_elsewhere(host, said)
        return MachineRanks(host, port, num_ranks // count, number, count), None
    place = MachineRanks(own_address(host, said), port, num_ranks // count, number, count)
    try:
        return place, listen(place.host, port)
    except OSError as error:
        raise UsageError(f"{said}: cannot listen there: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
