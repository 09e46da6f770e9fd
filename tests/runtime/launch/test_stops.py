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
from torch import nn

class Last(nn.Linear):
    passes = 0
    def forward(self, x):
        self.passes += not x.is_meta
        if self.passes == 5 and "RANK" in os.environ:  # the first of two microbatches of step 3
            os.kill(os.WHOM(), signal.SIGNAL)
        return super().forward(x)

def build(data):
    return [nn.Flatten, lambda: nn.Linear(64, 64), lambda: Last(64, 4)]
"""

WAYS = {
    "quintsched": ("quintsched.runtime.launch.local_run",),
    "torchrun": ("torch.distributed.run", "--nproc-per-node=2", "-m", "quintsched.runtime"),
}


@pytest.mark.parametrize(
    ("launcher", "whom", "number"),
    [
        ("quintsched", "getpid", "SIGUSR1"),  # every day: test_closed.py
        ("quintsched", "getppid", "SIGTERM"),
        ("quintsched", "getppid", "SIGINT"),
        ("torchrun", "getpid", "SIGTERM"),
        ("torchrun", "getppid", "SIGTERM"),
        ("torchrun", "getppid", "SIGINT"),
    ],
)
def test_a_signal_lets_the_run_save_and_end_with_0(tmp_path: Path, launcher: str, whom: str, number: str) -> None:
    job = write_job(tmp_path, JOB, MODEL.replace("WHOM", whom).replace("SIGNAL", number))
    code, out, err = run(sys.executable, "-m", *WAYS[launcher], "--config", job)
    found = re.search(r"^stopped as asked: saved at step (\d+)$", out, re.MULTILINE)
    assert found is not None, err
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{int(found[1]):08d}"]
    if whom == "getpid":
        assert found[1] == "3"
    assert code == (1 if (launcher, whom) == ("torchrun", "getppid") else 0)  # torchrun says so of any signal it gets
    assert "Traceback" not in err or launcher == "torchrun"


@pytest.mark.parametrize("launcher", WAYS)
def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path, launcher: str) -> None:
    slow = MODEL.replace("os.kill(os.WHOM(), signal.SIGNAL)", "print(os.getpid(), flush=True); time.sleep(60)")
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
