"""A rank is killed, the run is started again, goes on from its last checkpoint and ends with the same figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quintsched.runtime.comm import run_local
from quintsched.runtime.job.jobfile import load_job
from quintsched.runtime.launch.to_plan import plan_of
from quintsched.runtime.train.trainer import Trainer

from .test_processes import DATA, run

pytestmark = pytest.mark.processes

JOB = """
model: {{name: "{folder}/model.py:build"}}
data: {{name: "{folder}/data.py:load"}}
parallel: {{mesh: "dp=2"}}
train: {{epochs: 2, batch_size: 16, optimizer: {{name: adam, lr: 3e-3}}}}
runtime: {{timeout_s: 60}}
checkpoint: {{every: 2}}
log: {{every: 1}}
"""

MODEL = """
import os
from pathlib import Path
from torch import nn

FUSE = Path(__file__).with_name("fuse")

class Last(nn.Linear):
    steps = 0
    def forward(self, x):
        self.steps += not x.is_meta and self.training
        if self.steps == 7 and os.environ.get("RANK") == "1" and FUSE.exists():
            FUSE.unlink()
            os.kill(os.getpid(), 9)
        return super().forward(x)

def build(data):
    return [nn.Flatten, lambda: Last(64, 4)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "quintsched"])
def test_a_killed_rank_is_started_again_and_the_run_goes_on_from_the_last_step(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB.format(folder=tmp_path))
    ways = {
        "torchrun": ("torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "-m", "quintsched.runtime"),
        "quintsched": ("quintsched.runtime.launch.local", "--restarts", "1"),
    }
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    settings = [f"log.path={log}", f"checkpoint.dir={saved}"]
    (tmp_path / "fuse").touch()
    given = [argument for setting in settings for argument in ("--set", setting)]
    code, out, err = run(sys.executable, "-m", *ways[launcher], "--config", tmp_path / "job.yaml", *given)
    assert code == 0, err
    assert not (tmp_path / "fuse").exists()
    assert re.search("resumed after step [46]$", out, re.MULTILINE)  # step 6 may still have been on its way to the disk

    job = load_job(tmp_path / "job.yaml")
    plan = plan_of(job)
    expected = run_local(2, lambda transport: Trainer(job, plan, transport).fit())[0][-1]
    found = [r for r in map(json.loads, log.read_text().splitlines()) if r["event"] == "epoch"][-1]
    for figure in ("step", "loss", "validation_loss"):
        assert found[figure] == expected[figure]
