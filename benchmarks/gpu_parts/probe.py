"""Probe of NCCL between two ranks of one GPU: an all-reduce and a message each way; ends with 0 if correct.

torchrun --nproc-per-node 2 benchmarks/gpu_parts/probe.py
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=timedelta(seconds=40))
    total = torch.full((1 << 20,), float(rank + 1), device="cuda")
    dist.all_reduce(total)
    assert total.eq(3).all().item()
    channels = [dist.new_group([0, 1]) for _ in range(2)]
    for source, channel in enumerate(channels):
        tensor = torch.full((1 << 20,), float(rank), device="cuda")
        if rank == source:
            dist.send(tensor, 1 - source, channel)
        else:
            dist.recv(tensor, source, channel)
        torch.cuda.synchronize()
        assert tensor.eq(source).all().item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
