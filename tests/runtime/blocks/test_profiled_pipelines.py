"""Pipelines of torch under its profiler: the plan that `whatif` rebuilds is that of torch's schedule."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

from quintsched import torch_csv
from quintsched.ir.mesh import Mesh
from quintsched.solve.recorded import load_run, what_if

from ..ranks import run_ranks

WORLD, CHUNKS, MICROBATCHES, STEPS, WIDTH = 2, 2, 4, 2, 16
SCHEDULES = {"Interleaved1F1B": ((0, 2), (1, 3)), "ZBVZeroBubble": ((0, 3), (1, 2))}
"""Torch's schedules, with the stages of each rank."""


def train_profiled(name: str, rank: int, folder: Path) -> None:
    """Take steps under the profiler; write the trace, and, on rank 0, torch's file of its schedule."""
    folder.mkdir(exist_ok=True)
    mine, last = SCHEDULES[name][rank], WORLD * CHUNKS - 1
    made = [
        PipelineStage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), stage, last + 1, torch.device("cpu"))
        for stage in mine
    ]
    schedule = schedules.get_schedule_class(name)(made, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    inputs = torch.randn(2 * MICROBATCHES, WIDTH)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            schedule.step(*([inputs] if 0 in mine else []), target=inputs if last in mine else None)
    profiled.export_chrome_trace(str(folder / f"trace{rank}.json"))
    if rank == 0:
        schedule._dump_csv(str(folder / "schedule.csv"))


def run_rank(folder: Path) -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for name in SCHEDULES:
        train_profiled(name, dist.get_rank(), folder / name)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.processes
def test_plans_are_rebuilt_exactly_from_profiles(tmp_path: Path) -> None:
    assert run_ranks(run_rank, WORLD, tmp_path, timeout_s=150) == [0] * WORLD
    for name in SCHEDULES:
        run = load_run(tmp_path / name)
        theirs = torch_csv.loads((tmp_path / name / "schedule.csv").read_text(), mesh=Mesh(pp=WORLD), name="recorded")
        assert run.source == "torch.profiler"
        assert run.plan.to_json() == theirs.plan.to_json()
        assert len(run.steps) == STEPS
        found = what_if(run, effort=1, seconds=1)
        assert found.replayed["all"] == pytest.approx(found.step.makespan, rel=0.01)
        assert found.replayed["computations"] <= found.step.makespan
