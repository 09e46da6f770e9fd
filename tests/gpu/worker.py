"""One rank of a world of processes that does one training after the other, over NCCL or gloo.

python -m tests.gpu.worker nccl FOLDER STEPS NAME …        (started by `Machine.run`)

Each training has a transport, and so communicators, of its own, which end with it. What the ranks end with lies in
FOLDER, a file per rank.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from quintsched.runtime.comm import Transport, connect
from quintsched.runtime.comm.device import claim_device

from .machine import Backend
from .runs import RUNS

TIMEOUT_S = 300  # a rank may compile meanwhile


def train(transport: Transport, name: str, steps: int) -> dict[str, Any]:
    found = RUNS[name].train(transport, steps)
    tensors = {"weights": found.weights, "gradients": found.gradients}
    return {"losses": found.losses, "norms": found.norms, "tokens": found.tokens, **_on_host(tensors)}


def _on_host(tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {kind: {name: tensor.cpu() for name, tensor in named.items()} for kind, named in tensors.items()}


def run(backend: Backend, name: str, steps: int) -> dict[str, Any]:
    transport = connect(backend, timeout_s=TIMEOUT_S)
    found = train(transport, name, steps)
    flag = torch.zeros(1, device=transport.device)
    dist.all_reduce(flag)
    flag.item()  # a communicator must not end under a rank that is not through yet
    transport.close()
    return found


def main(backend: Backend, folder: Path, steps: int, names: list[str]) -> None:
    claim_device(backend)  # before anything else asks for a device
    torch.backends.cudnn.allow_tf32 = False  # single precision is single precision
    dist.init_process_group(backend)
    found = {}
    for name in names:
        since = time.perf_counter()
        try:
            found[name] = run(backend, name, steps)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
        if os.environ["RANK"] == "0":
            print(f"{time.perf_counter() - since:6.1f} s  {name}", flush=True)  # noqa: T201
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(cast(Backend, sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
