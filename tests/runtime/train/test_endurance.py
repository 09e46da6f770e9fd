"""1,000 steps over gloo: no growth of memory, file descriptors, threads, tensors or anything else that Python can see.

200 steps ─▶ footprint ─▶ 800 steps ─▶ footprint        a leak of one object per step would be 800 by then
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

import quintsched as qs
from quintsched.runtime import Engine, connect
from quintsched.runtime.blocks.block_builders import Blocks

from ..ranks import run_ranks

WARM_UP, STEPS = 200, 1000
WIDTH, SAMPLES = 64, 128
SLACK_BYTES = 3_000_000
"""Memory that the allocator may keep: less than one activation of one microbatch per step."""
SLACK_OBJECTS = 100


@dataclass(frozen=True)
class Footprint:
    """Resources of a process. `nodes` are Python's handles on autograd's graph, `objects` all that Python can see.

    The first look at all types leaves something behind itself, in the cache of `Node`'s subclasses.
    """

    resident_bytes: int
    files: int
    threads: int
    tensors: int
    nodes: int
    objects: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        seen = gc.get_objects()
        return cls(
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            tensors=sum(issubclass(type(found), Tensor) for found in seen),
            nodes=sum(issubclass(type(found), Node) for found in seen),
            objects=len(seen),
        )

    def grows_to(self, after: Footprint) -> bool:
        return (
            (after.files, after.threads) != (self.files, self.threads)
            or max(after.tensors - self.tensors, after.nodes - self.nodes) > 5
            or after.objects - self.objects > SLACK_OBJECTS
            or after.resident_bytes - self.resident_bytes > SLACK_BYTES
        )


def endure(schedule: str) -> None:
    """Train on this rank; what its process holds is as much after all steps as after the warm-up."""
    transport = connect("gloo", timeout_s=60)
    plan = qs.compile(schedule, mesh=qs.Mesh(pp=transport.world_size), microbatches=4)
    blocks: Blocks = [lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh, lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh]
    engine = Engine(plan, blocks, nn.functional.mse_loss, lambda ps: torch.optim.SGD(ps, 0.01), transport=transport)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    found = {}
    for step in range(STEPS + 1):
        result = engine.step(inputs, targets)
        if step in (0, WARM_UP, STEPS):
            assert torch.isfinite(result.loss)
            engine.everyone.barrier()
            found[step] = Footprint.now()
            engine.everyone.barrier()
    assert not found[WARM_UP].grows_to(found[STEPS]), found
    transport.close()


def run_rank(schedules: list[str]) -> None:
    dist.init_process_group("gloo")
    for schedule in schedules:
        endure(schedule)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.processes
def test_a_thousand_steps_over_gloo() -> None:
    assert run_ranks(run_rank, 2, ["1f1b", "zb-h1"], timeout_s=300) == [0, 0]
