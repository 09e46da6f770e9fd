"""Many steps, and what a process holds before and after them: nothing may grow.

    200 steps ─▶ footprint ─▶ 800 steps ─▶ footprint        a leak of one object per step would be 800 by then

As a program under torchrun, it does so on every rank over gloo and writes what it found to FOLDER:

    torchrun --nproc-per-node 2 -m tests.runtime.train.endurance FOLDER 1f1b zb-h1
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

import quintsched as qs
from quintsched.runtime import Engine, Transport, connect
from quintsched.runtime.blocks.block_builders import Blocks

MICROBATCHES = 4
WARM_UP, STEPS = 200, 1000
WIDTH, SAMPLES = 64, 128


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


def endure(transport: Transport, schedule: str) -> tuple[Footprint, Footprint]:
    """Train on two ranks; returns what the process held after the warm-up and after all steps."""
    plan = qs.compile(schedule, mesh=qs.Mesh(pp=transport.world_size), microbatches=MICROBATCHES)
    blocks: Blocks = [lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh, lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh]
    engine = Engine(plan, blocks, nn.functional.mse_loss, lambda ps: torch.optim.SGD(ps, 0.01), transport=transport)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    footprints = {}
    for step in range(STEPS + 1):
        result = engine.step(inputs, targets)
        if step in (0, WARM_UP, STEPS):
            assert torch.isfinite(result.loss)
            engine.everyone.barrier()
            for rank in range(transport.world_size):  # in turn: ranks may be threads, and to look takes a file
                if rank == transport.rank:
                    footprints[step] = Footprint.now()
                engine.everyone.barrier()
    return footprints[WARM_UP], footprints[STEPS]


def main(folder: Path, schedules: list[str]) -> None:
    dist.init_process_group("gloo")
    found = {}
    for schedule in schedules:
        transport = connect("gloo", timeout_s=60)
        found[schedule] = [asdict(footprint) for footprint in endure(transport, schedule)]
        transport.close()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
