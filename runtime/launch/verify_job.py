"""Command `quintsched verify`: some steps of a job on its mesh and in one process, and the first difference.

job ──▶ mesh: dp=2,pp=2,…    a process per rank, or threads   ──▶ recordings ─┐
    ──▶ one rank, the same microbatches                                       ├──▶ comparison
    ──▶ the same in float64: the effect of rounding                           ┘
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quintsched.errors import InputError, QuintschedError
from quintsched.files.terminal import shown, standard_streams, write_error

from . import worker
from .run_arguments import VerifyRequest, read_request
from .stop_signals import let_through

if TYPE_CHECKING:
    from quintsched.plan import Plan

    from ..comm import Transport
    from ..run_checks.compare_with_one_process import Comparison
    from ..run_checks.record_steps import StepRecording
    from ..settings.job_file import JobConfig

DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the runs of a job and print the result; or, `into` a directory, be a rank that records its part."""
    request = read_request(VerifyRequest, sys.argv[1:] if argv is None else argv)
    if request.into is not None:
        return _as_rank(request, Path(request.into))
    try:
        comparison = verify(request)
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    found = json.dumps(comparison.to_data(), indent=1) if request.as_json else shown(comparison.explain())
    sys.stdout.write(found + "\n")
    return 0 if comparison.is_equal else DIFFERENT


def verify(request: VerifyRequest) -> Comparison:
    """Return the comparison of a job; raises as running it does, `SystemExit` where its ranks have printed why."""
    job, plan, _ = worker.prepare(request, alone=True)
    if job.runtime.transport == "local" or plan.mesh.size == 1:
        return verify_here(job, plan, request.steps)
    from .job_plan import Worlds
    from .local_run import preloaded_for, start_ranks

    with tempfile.TemporaryDirectory() as folder:
        of_ranks = request.model_copy(update={"into": folder})
        ranks, module = Worlds([plan.mesh.size]), "quintsched.runtime.launch.verify_job"
        code = start_ranks(ranks, module, [of_ranks.model_dump_json()], preloaded=preloaded_for(job))
        if code:
            raise SystemExit(code)
        mesh = [load(Path(folder), rank) for rank in range(plan.mesh.size)]
    return compare_with_one(job, plan, mesh, request.steps)


def _as_rank(request: VerifyRequest, directory: Path) -> int:
    """Record this rank's part; returns the exit code."""
    rank = int(os.environ.get("RANK", 0))
    let_through()
    try:
        job, plan, _ = worker.prepare(request)
        with worker.connected(job, plan) as transport:
            save(record(job, plan, transport, request.steps), directory)
    except Exception as error:
        return worker.explain(error, rank)
    return 0


def record(job: JobConfig, plan: Plan, transport: Transport, steps: int) -> StepRecording:
    """Train some steps of a job as one rank, and return the recorded tensors."""
    from ..train.trainer import Trainer

    trainer = Trainer.of_job(job, plan, transport)
    if transport.rank == 0 and trainer.engine.tensor_cuts is not None:
        sys.stderr.write(f"{shown(trainer.engine.tensor_cuts)}\n")
    return trainer.record(steps)


def record_alone(job: JobConfig, plan: Plan, steps: int, precision: str | None = None) -> StepRecording:
    """Train the same steps on one rank, in the same microbatches."""
    import quintsched as qs

    from ..comm import run_local

    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    microbatches = replicas * plan.schedule.microbatches
    alone = qs.compile("1f1b", mesh="dp=1", microbatches=microbatches)
    runtime = job.runtime.model_copy(
        update={"transport": "local", "rules": None, "compile": False, "trace": None}
        | ({"precision": precision} if precision else {})
    )
    parallel = job.parallel.model_copy(update={"sequence_parallel": False, "rules": {}, "prove": "none"})
    single = job.model_copy(update={"runtime": runtime, "parallel": parallel})
    (recording,) = run_local(1, lambda transport: record(single, alone, transport, steps), runtime.timeout_s)
    return recording


def verify_here(job: JobConfig, plan: Plan, steps: int) -> Comparison:
    """Run all ranks in this process, and compare them with one rank."""
    from ..comm import run_local

    rules = job.runtime.rules or "mailbox"
    mesh = run_local(
        plan.mesh.size, lambda transport: record(job, plan, transport, steps), job.runtime.timeout_s, rules=rules
    )
    return compare_with_one(job, plan, mesh, steps)


def compare_with_one(job: JobConfig, plan: Plan, mesh: Sequence[StepRecording], steps: int) -> Comparison:
    """Compare the recordings of a mesh's ranks with one rank's."""
    from ..run_checks.compare_with_one_process import compare

    alone = record_alone(job, plan, steps)
    precise = alone if job.runtime.precision == "float64" else record_alone(job, plan, steps, "float64")
    return compare(mesh, alone, precise, plan, class_names(job))


def class_names(job: JobConfig) -> list[str]:
    """Return the names of the classes of a job's blocks."""
    from ..blocks.block_builders import on_meta
    from ..data import load_dataset
    from ..models import build_model

    blocks = build_model(job.model, load_dataset(job.data).spec)
    return [type(on_meta(block)).__name__ for block in blocks]


def save(recording: StepRecording, directory: Path) -> None:
    """Write the recording of a rank: a safetensors file, with metadata."""
    from safetensors.torch import save_file

    tensors = {str(number): made.tensor.contiguous() for number, made in enumerate(recording.made)}
    about = {**vars(recording), "made": [{**vars(made), "tensor": None} for made in recording.made]}
    save_file(tensors, directory / f"rank{recording.rank}.safetensors", {"about": json.dumps(about)})


def load(directory: Path, rank: int) -> StepRecording:
    """Read a rank's recording; raises `InputError` where there is none."""
    from safetensors import safe_open

    from ..run_checks.record_steps import Made, StepRecording

    path = directory / f"rank{rank}.safetensors"
    if not path.is_file():
        raise InputError(f"rank {rank} has recorded nothing; see what it said above")
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        for number, made in enumerate(about["made"]):
            made["tensor"] = file.get_tensor(str(number))
            made["offsets"] = made["offsets"] and tuple(made["offsets"])
    return StepRecording(**{**about, "made": [Made(**made) for made in about["made"]]})


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
