"""One rank of a world of processes that trains one case of the equality matrix after the other, over NCCL.

torchrun --nproc-per-node 4 -m tests.gpu.matrix_worker nccl FOLDER STEPS CASE …

With gloo instead of nccl it does the same without a GPU. Each case has a transport, and so communicators, of its own,
which end with it. What the ranks end with lies in FOLDER, a file per rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist

from quintsched.runtime.comm import connect
from tests.runtime.matrix import CASES, LENGTH, OVERLAPPING, Case
from tests.runtime.toys import Task, ids_task, train_rank

TIMEOUT_S = 60


def task_of(case: Case, steps: int) -> Task:
    samples = 2 * case.in_step
    return Task.make(steps, samples, torch.float64) if case.model == "vit" else ids_task(steps, samples, LENGTH)


def train(backend: Literal["nccl", "gloo"], case: Case, steps: int) -> dict[str, object]:
    transport = connect(backend, timeout_s=TIMEOUT_S)
    found = train_rank(transport, case.plan, task_of(case, steps), case.blocks, dtype=torch.float64, tied=case.tied)
    weights = {name: weight.cpu() for name, weight in found.weights.items()}
    flag = torch.zeros(1, device=transport.device)
    dist.all_reduce(flag)
    flag.item()  # a communicator must not end under a rank that is not through yet
    transport.close()
    return {"losses": found.losses, "weights": weights}


def main(backend: Literal["nccl", "gloo"], folder: Path, steps: int, names: list[str]) -> None:
    plain = [replace(case, overlap=False) for case in OVERLAPPING.values()]
    cases, found = {str(case): case for case in (*CASES, *OVERLAPPING.values(), *plain)}, {}
    dist.init_process_group(backend)
    for name in names:
        try:
            found[name] = train(backend, cases[name], steps)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(cast(Literal["nccl", "gloo"], sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
