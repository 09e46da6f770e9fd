"""Real processes, a rank each, that start quickly: forked from a server that has imported torch once.

server   import torch, quintsched.runtime          once for each worker of the tests
            ├─ fork ─▶ rank 0: target(…)           with the environment that torchrun would give
            └─ fork ─▶ rank 1: target(…)
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "quintsched.compiler",
    "quintsched.runtime.launch.local_run",
    "quintsched.runtime.launch.worker",
    "quintsched.runtime.train.trainer",
    "quintsched.runtime.comm.choose_transport",
    "quintsched.stalls.culprit",
]
"""Modules that the server imports: the first use in a process decides, so that all uses have the same."""


def run_ranks(
    target: Callable[..., None], world_size: int, *arguments: Any, timeout_s: float = 120
) -> list[int | None]:
    """Call `target(*arguments)` in a process per rank, and return their exit codes; none is left running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    processes = [
        context.Process(target=_run_rank, args=(rank, world_size, port, target, arguments))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def _run_rank(rank: int, world_size: int, port: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    target(*arguments)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
