"""`quintsched run`, `verify`, `inspect`: start the runtime, which ends with this process; pass on signals and codes.

Also the plan of a job file, for `quintsched compile job.yaml`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.errors import UsageError
from quintsched.files.terminal_progress import progress

if TYPE_CHECKING:
    from quintsched.plan import Plan

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
JOB_SUFFIXES = (".yaml", ".yml")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting of the job; repeatable.")
]

Processes = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, help="Processes here; default: this machine's of the mesh's ranks."),
]
LeastReplicas = Annotated[
    int | None,
    typer.Option("--min-dp", metavar="D", min=1, help="Restarts after ranks were lost have fewer replicas, to D."),
]


def run(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[PLAN] JOB", help="A plan file, if wanted, and a job file.")
    ] = None,
    overrides: Overrides = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="Write a trace there: when each instruction ran.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest whole checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run's checkpoints away; start anew.")] = False,
    changed: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="A.B", help="Resume with another value of this setting; repeatable."),
    ] = None,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Try a better plan after some steps; keep it where it is faster.")
    ] = False,
    nproc: Processes = None,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", min=0, help="Start a run that failed again, so many times.")
    ] = 0,
    min_dp: LeastReplicas = None,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", min=1, help="How many machines run it.")] = 1,
    node_rank: Annotated[
        int, typer.Option("--node-rank", metavar="I", min=0, help="Which of them this is, from 0.")
    ] = 0,
    master: Annotated[
        str | None, typer.Option("--master", metavar="HOST:PORT", help="Machine 0's address, and a free port of it.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings of the job, with their meaning; run nothing.")
    ] = False,
    print_schema: Annotated[
        bool, typer.Option("--print-schema", help="Print the JSON Schema of job files; run nothing.")
    ] = False,
) -> None:
    """Run a job, a process per rank, on one machine or several.

    SIGTERM, SIGUSR1 or Ctrl-C lets it finish the step in progress, save, and end with 0; Ctrl-C again ends it at once.
    """
    if print_schema:
        raise typer.Exit(call(_launch("show_job", {"what": "schema"})))
    plan, job = plan_and_job(files or [])
    if print_config:
        request = {**_job_request(plan, job, overrides), "trace": trace and str(trace), "what": "settings"}
        raise typer.Exit(call(_launch("show_job", request)))
    if resume and fresh:
        raise UsageError("--resume goes on with an earlier run and --fresh does not; give one of them")
    _require_torch()
    _require_machines(nnodes, node_rank, master)
    of_run = {"trace": trace and str(trace), "resume": resume, "fresh": fresh, "override": changed or []}
    of_run["autotune"] = autotune
    of_launcher = {"nproc": nproc, "restarts": restarts, "min_dp": min_dp, "nnodes": nnodes, "node_rank": node_rank}
    request = {**_job_request(plan, job, overrides), **of_run, **of_launcher, "master": master or ""}
    raise typer.Exit(call(_launch("local_run", request)))


def _require_machines(nnodes: int, node_rank: int, master: str | None) -> None:
    if node_rank >= nnodes or (nnodes > 1 and master is None):
        raise UsageError("several machines need --nnodes N --node-rank I --master HOST:PORT, I from 0 to N - 1")


def verify(
    files: Annotated[list[Path], typer.Argument(metavar="[PLAN] JOB", help="A plan file, if wanted, and a job file.")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many steps are compared.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that differs, machine-readable.")] = False,
) -> None:
    """Run a job on its mesh and in one process, and compare them.

    Runs some steps from the same weights on both, and names the first layer that differs.

    Compares outputs of blocks, gradients, weights and losses, with the rounding error of one process as tolerance
    (found by a run in float64). Exit code 1 if they differ.
    """
    plan, job = plan_and_job(files)
    _require_torch()
    request = {**_job_request(plan, job, overrides), "steps": steps, "as_json": as_json}
    raise typer.Exit(call(_launch("verify_job", request)))


def inspect(
    files: Annotated[list[Path], typer.Argument(metavar="[PLAN] JOB", help="A plan file, if wanted, and a job file.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it machine-readable.")] = False,
) -> None:
    """Report the inputs, outputs, side effects and random draws of a job's blocks.

    Runs one step with ranks as threads of one process on the CPU; saves nothing. Refuses jobs that cannot be trained,
    as `run` does.
    """
    plan, job = plan_and_job(files)
    _require_torch()
    raise typer.Exit(call(_launch("show_job", {**_job_request(plan, job, overrides), "as_json": as_json})))


def _launch(module: str, request: Mapping[str, object]) -> list[str]:
    """Return the command that passes a request to a module of `quintsched.runtime.launch`.

    That process ends with this one, however this one ends.
    """
    ends_with = [sys.executable, "-m", "quintsched.runtime.watch.rendezvous.end_with_parent", str(os.getpid())]
    return [*ends_with, f"quintsched.runtime.launch.{module}", json.dumps(request)]


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError("running needs torch; pip install 'quintsched[runtime]'")


def _job_request(plan: Path | None, job: Path, overrides: Sequence[str] | None) -> dict[str, object]:
    return {"plan": plan and str(plan), "config": str(job), "set": overrides or []}


def plan_and_job(files: Sequence[Path]) -> tuple[Path | None, Path]:
    """Return the plan file, if there is one, and the job file; raises `UsageError` if they are no such files."""
    settings = [str(file) for file in files if "=" in str(file) and not file.exists()]
    if settings:
        raise UsageError(f"settings of the job go by --set, each with its full key: --set {settings[0]}")
    if not 1 <= len(files) <= 2 or files[-1].suffix not in JOB_SUFFIXES:
        raise UsageError("give a job file, and before it a plan file if wanted: [plan.json] job.yaml")
    for file in files:
        if not file.is_file():
            raise UsageError(f"there is no file {str(file)!r}")
    return (files[0] if len(files) == 2 else None), files[-1]


def plan_of_job(job: Path, overrides: Sequence[str] | None) -> Plan:
    """Return the plan that a run of a job file has; exits as that run would where it is refused."""
    from quintsched.plan import Plan

    if job.suffix not in JOB_SUFFIXES:
        raise UsageError(f"{job}: compile takes a job file ({' or '.join(JOB_SUFFIXES)}), or the plan's own options")
    plan_and_job([job])
    _require_torch()
    command = [
        sys.executable,
        "-m",
        "quintsched.runtime.launch.show_job",
        json.dumps({**_job_request(None, job, overrides), "what": "plan"}),
    ]
    with progress(f"compiling the plan of {job}"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return Plan.from_json(done.stdout)


def call(command: list[str]) -> int:
    """Run a command, forward signals to it, and return its exit code: 128 + n if signal n killed it.

    It has a process group of its own, so that Ctrl-C reaches it once, through this process. Ignored signals (nohup)
    stay ignored.
    """
    early: list[int] = []
    handled = [number for number in _signals() if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda received, _: early.append(received)) for number in handled}
    try:
        with subprocess.Popen(command, process_group=0) as child:
            for number in handled:
                signal.signal(number, lambda received, _: child.send_signal(received))
            for received in early:
                child.send_signal(received)
            code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in PASSED_ON if hasattr(signal, name)]
