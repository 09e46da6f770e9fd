"""Signals to the launcher or a rank of a run of real processes: it finishes its step, saves, and ends with 0."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ...helpers.commands import run, write_job

pytestmark = [pytest.mark.processes, pytest.mark.slow]

JOB = """
model: {{name: "{folder}/model.py:build"}}
data: {{name: "{folder}/data.py:load"}}
parallel: {{mesh: "pp=2", microbatches: 2}}
train: {{epochs: 1000, batch_size: 16}}
runtime: {{timeout_s: 60}}
checkpoint: {{dir: "{folder}/saved", every: 1000000}}
"""

MODEL = """
import os, signal
from pathlib import Path
from torch import nn

def passes_made():
    return Path(__file__).with_name("passes").stat().st_size

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

class Last(nn.Linear):
    def forward(self, x):
        if not x.is_meta and "RANK" in os.environ:
            with Path(__file__).with_name("passes").open("a") as passes:  # a block that counts them itself is refused
                passes.write("1")
            if passes_made() == 5:  # the first of two microbatches of step 3
                os.kill(WHOM, signal.SIGNAL)
        return super().forward(x)

def build(data):
    return [nn.Flatten, lambda: nn.Linear(64, 64), lambda: Last(64, 4)]
"""

PIDS = {"rank": "os.getpid()", "launcher of quintsched": "parent(os.getppid())", "launcher of torchrun": "os.getppid()"}
"""Process ids as a rank finds them: ranks of our launcher are forked by a server."""
WAYS = {
    "quintsched": ("quintsched.runtime.launch.local_run",),
    "torchrun": ("torch.distributed.run", "--nproc-per-node=2", "-m", "quintsched.runtime"),
}


@pytest.mark.parametrize(
    ("launcher", "whom", "number"),  # SIGUSR1 to a rank, every day: test_closed.py
    [
        ("quintsched", "launcher", "SIGTERM"),
        ("quintsched", "launcher", "SIGINT"),
        ("torchrun", "rank", "SIGTERM"),
        ("torchrun", "launcher", "SIGTERM"),
        ("torchrun", "launcher", "SIGINT"),
    ],
)
def test_a_signal_lets_the_run_save_and_end_with_0(tmp_path: Path, launcher: str, whom: str, number: str) -> None:
    pid = PIDS.get(whom) or PIDS[f"launcher of {launcher}"]
    job = write_job(tmp_path, JOB, MODEL.replace("WHOM", pid).replace("SIGNAL", number))
    code, out, err = run(sys.executable, "-m", *WAYS[launcher], "--config", job)
    found = re.search(r"^stopped as asked: saved at step (\d+)$", out, re.MULTILINE)
    assert found is not None, err
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{int(found[1]):08d}"]
    if whom == "rank":
        assert found[1] == "3"
    assert code == (1 if (launcher, whom) == ("torchrun", "launcher") else 0)  # torchrun says so of any signal it gets
    assert "Traceback" not in err or launcher == "torchrun"


@pytest.mark.parametrize("launcher", WAYS)
def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path, launcher: str) -> None:
    slow = MODEL.replace("os.kill(WHOM, signal.SIGNAL)", "print(os.getpid(), flush=True); time.sleep(60)")
    job = write_job(tmp_path, JOB, slow.replace("import os", "import os, time"))
    command = [sys.executable, "-m", *WAYS[launcher], "--config", str(job)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        rank = int(next(line for line in process.stdout if line.strip().isdecimal()))
        process.send_signal(signal.SIGINT)
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - began < 10, err
    assert process.returncode == (130 if launcher == "quintsched" else 1), err
    deadline = time.monotonic() + 5
    while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}").exists()
