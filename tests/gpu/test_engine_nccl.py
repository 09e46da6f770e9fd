"""The engine over NCCL gives the numbers of one process; ranks share a GPU where there are fewer (NCCL 2.30)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .sharing import environment, wants_ranks

pytestmark = [pytest.mark.processes, wants_ranks(8)]

JOB = """
model: {options: {hidden: 32, depth: 4, heads: 4}}
data: {name: "DATA:load"}
train: {epochs: 2, batch_size: 16, optimizer: {name: sgd, lr: 0.05, momentum: 0.9}, clip: 1.0}
runtime: {timeout_s: 60, precision: float64}
log: {every: 1}
"""

DATA = """
import numpy as np
from quintsched.runtime.data import Dataset, Split

def load():
    random = np.random.default_rng(0)
    def split(n):
        targets = random.integers(0, 4, n)
        inputs = random.normal(size=(n, 1, 8, 8)).astype(np.float32) + targets[:, None, None, None]
        return Split(inputs=inputs, targets=targets)
    return Dataset(name="steps", train=split(75), validation=split(20), num_classes=4)
"""


def losses(job: Path, log: Path, *settings: str) -> list[float]:
    sets = [part for setting in (*settings, f"log.path={log}") for part in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "quintsched.runtime.launch.local", "--config", str(job), *sets],
        env=os.environ | environment(8),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [("dp=2", "1f1b"), ("pp=2", "1f1b"), ("tp=2", "1f1b"), ("pp=4", "interleaved-1f1b"), ("dp=2,pp=2,tp=2", "1f1b")],
)
def test_losses_equal_one_process(tmp_path: Path, mesh: str, schedule: str) -> None:
    (tmp_path / "data.py").write_text(DATA)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("DATA", str(tmp_path / "data.py")))
    depth = "model.options.depth=6"
    alone = losses(job, tmp_path / "alone.jsonl", depth)
    settings = (f"parallel.mesh='{mesh}'", f"parallel.schedule={schedule}", "parallel.microbatches=4")
    found = losses(job, tmp_path / "found.jsonl", depth, *settings, "runtime.transport=nccl")
    assert found == pytest.approx(alone, abs=1e-10)
