"""A job of four ranks on several hosts, with one launcher on each."""

import subprocess
import sys
import time
from pathlib import Path

from ...helpers.commands import write_job
from .hosts import Hosts
from .losing_model import losing

JOB = """
model: {{name: "{folder}/model.py:build"}}
data: {{name: "{folder}/data.py:load"}}
parallel: {{mesh: "dp=2,pp=2", microbatches: 2}}
train: {{epochs: {epochs}, batch_size: 16}}
runtime: {{timeout_s: 60}}
checkpoint: {{every: 1000000}}
log: {{every: 1}}
"""

MODEL = losing({"3": 3})


def job_of(folder: Path, epochs: int = 1) -> Path:
    return write_job(folder, JOB, MODEL, epochs=epochs)


def launch(net: Hosts, job: Path, *more: object, way: str = "quintsched") -> list[subprocess.Popen[str]]:
    """Start a run with a launcher on each host."""
    started, count, port = [], len(net.names), 29517
    for number in range(count):
        where = ["--nnodes", count, "--node-rank", number]
        if way == "quintsched":
            command = ["quintsched.runtime.launch.local_run", *where, "--master", f"{net.addresses[0]}:{port}"]
        else:
            where += ["--nproc-per-node", 4 // count, "--master-addr", net.addresses[0], "--master-port", port]
            command = ["torch.distributed.run", *where, "-m", "quintsched.runtime"]
        started.append(net.start(number, sys.executable, "-m", *command, "--config", job, *more))
    return started


def ends(started: list[subprocess.Popen[str]], timeout_s: float = 120) -> list[tuple[int, str, str]]:
    deadline = time.monotonic() + timeout_s
    found = []
    for process in started:
        out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
        found.append((process.returncode, out, err))
    return found


def wait_for_steps(folder: Path) -> None:
    """Wait until the ranks of the last stage, 1 and 3, are in their second step."""
    deadline = time.monotonic() + 90
    while len([*folder.glob("rank-*")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
