"""Processes that say something to each other over gloo or NCCL, and end with the call whatever happens.

run_processes(work, 4, …)   ──▶  work(transport 0, …)   work(transport 1, …)   …   ──▶  what each returned
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from quintsched.errors import StallError

from ..comm import Transport, connect
from ..comm.clock import now_s
from ..comm.device import library_of, use_device
from ..watch.rendezvous.addresses import choose_interfaces


def run_processes(
    work: Callable[[Transport], Any], num_processes: int, device: torch.device, timeout_s: float
) -> list[Any]:
    """Return `work(transport)` of fresh processes, by rank; what it returns travels as JSON.

    `work` is a function of a module, by whose name the processes find it. Each uses one thread, as the ranks of a run.
    Raises what a process raised, and `StallError` after `timeout_s`; no process outlives the call.
    """
    with TemporaryDirectory() as folder:
        context = start_processes(
            _enter,
            args=(work, num_processes, folder, device.type, timeout_s),
            nprocs=num_processes,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        deadline = now_s() + timeout_s
        try:
            while not context.join(timeout=max(0.0, deadline - now_s())):
                if now_s() > deadline:
                    raise StallError(f"{num_processes} processes that measure links took longer than {timeout_s:g} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_processes)]


def _enter(
    rank: int, work: Callable[[Transport], Any], num_processes: int, folder: str, kind: str, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    library = library_of(use_device(torch.device(kind), rank))
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(num_processes)
    choose_interfaces()
    dist.init_process_group(
        library,
        f"file://{folder}/store",
        timeout=timedelta(seconds=timeout_s),
        rank=rank,
        world_size=num_processes,
    )
    transport = connect(library, timeout_s)
    Path(folder, f"{rank}.json").write_text(json.dumps(work(transport)))
    dist.barrier()
    transport.close()
    dist.destroy_process_group()
