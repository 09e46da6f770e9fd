"""Processes of this machine as torchrun would start them, which all end with the call: none is left on the GPU.

run_world(4, ["-m", "tests.gpu.worker", …], timeout_s=100)

torchrun starts each rank in a session of its own: killing torchrun leaves its ranks behind, and one that hangs on a
GPU blocks all later runs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

GRACE_S = 10.0
"""Time that other ranks may go on when one has failed: a rank left alone has more to report."""

MOST_WORDS = 4000


class WorldFailedError(Exception):
    """Failure of a rank, or a timeout; has the output of all ranks."""


def run_world(
    world_size: int, command: Sequence[str], *, timeout_s: float, variables: Mapping[str, str] | None = None
) -> None:
    """Run Python with these arguments on so many ranks, and return when all have ended well.

    Args:
        command: arguments of the interpreter.
        variables: environment variables of the ranks besides those of this process.

    Raises:
        WorldFailedError: they did not.
    """
    with TemporaryDirectory() as folder, ExitStack() as outputs:
        names = [Path(folder, f"{rank}.txt") for rank in range(world_size)]
        addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        told = {**os.environ, **(variables or {}), **addresses, **sizes}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                output = outputs.enter_context(name.open("wb"))
                mine = told | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started = subprocess.Popen([sys.executable, *command], env=mine, stdout=output, stderr=output)
                processes.append(started)
            code = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        if code is None or code:
            what = f"took longer than {timeout_s:g} s" if code is None else "failed"
            words = "\n".join(f"rank {rank}: …{_end_of(name)}" for rank, name in enumerate(names))
            raise WorldFailedError(f"{world_size} ranks of {' '.join(command)[:300]} {what}\n{words}")


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> int | None:
    """Return 0 when all have ended well, or soon after a failure its exit code; None after the deadline."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        if all(code is not None for code in codes):
            return failed or 0
        if time.monotonic() > deadline_s:
            return failed
        time.sleep(0.05)


def _end_of(name: Path) -> str:
    return name.read_bytes()[-MOST_WORDS:].decode(errors="replace")
