"""dp follows the number of processes; a run that has lost ranks goes on with fewer replicas."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.comm import run_local
from quintsched.runtime.launch.job_plan import Worlds, for_processes, plan_of, smaller_worlds
from quintsched.runtime.settings.job_file import JobConfig, load_job
from quintsched.runtime.train.trainer import Trainer

from ...helpers.commands import run, write_job
from .hosts import hosts
from .killed_job import JOB, MODEL


def job(mesh: str, **parallel: object) -> JobConfig:
    settings = {"mesh": mesh, "microbatches": 2, "elastic": True} | parallel
    return JobConfig.model_validate({"parallel": settings, "train": {"batch_size": 48}})


@pytest.mark.parametrize(
    ("mesh", "processes", "expected"),
    [
        ("dp=4,pp=2", 8, "dp=4,pp=2"),
        ("dp=4,pp=2", 2, "dp=1,pp=2"),
        ("pp=2,dp=2,tp=2", 12, "pp=2,dp=3,tp=2"),
        ("pp=2", 4, "dp=2,pp=2"),
    ],
)
def test_dp_is_what_the_processes_make(mesh: str, processes: int, expected: str) -> None:
    found = for_processes(job(mesh), None, processes)
    assert str(plan_of(found).mesh) == expected
    assert for_processes(job(mesh, elastic=False), None, processes).parallel.mesh == mesh


def test_what_cannot_be_elastic_is_refused() -> None:
    with pytest.raises(MisfitError, match=r"5 processes make no whole replica of 2 ranks, .* start 4"):
        for_processes(job("dp=4,pp=2"), None, 5)
    with pytest.raises(UsageError, match=r"parallel\.elastic compiles a plan"):
        for_processes(job("dp=2"), "plan.json", 2)


def test_smaller_worlds_divide_the_batch_and_the_machines() -> None:
    whole = job("dp=4,pp=2")
    assert smaller_worlds(whole, plan_of(whole), 1) == [8, 6, 4, 2]
    assert smaller_worlds(whole, plan_of(whole), 2) == [8, 6, 4]
    assert smaller_worlds(whole, plan_of(whole), 1, machines=4) == [8, 4]
    sixteen = whole.model_copy(update={"train": whole.train.model_copy(update={"batch_size": 16})})
    assert smaller_worlds(sixteen, plan_of(sixteen), 1) == [8, 4, 2]


def test_all_ranks_are_tried_again_once_fewer_have_got_on(tmp_path: Path) -> None:
    def save(step: int) -> None:
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "manifest.json").touch()

    save(3)
    worlds, fixed = Worlds([8, 6, 4], tmp_path), Worlds([8, 6, 4])
    found = []
    for step, lost_one in [(6, True), (None, True), (9, True), (None, False), (12, True), (15, False), (18, False)]:
        if step is not None:
            save(step)
        worlds.ended(lost_one=lost_one)
        fixed.ended(lost_one=lost_one)
        found.append((worlds.size, fixed.size))
    assert found == [(6, 6), (4, 4), (8, 4), (8, 4), (6, 4), (8, 4), (8, 4)]


LOSES_TWICE = """
import os
from pathlib import Path
from torch import nn

class Last(nn.Linear):
    steps = 0
    def forward(self, x):
        self.steps += not x.is_meta and self.training
        self.lose("1", "first", 2)
        self.lose("0", "second", 5)
        return super().forward(x)
    def lose(self, rank, name, step):
        fuse = Path(__file__).with_name(name)
        if self.steps == step and os.environ.get("RANK") == rank and fuse.exists():
            fuse.unlink()
            os.kill(os.getpid(), 9)

def build(data):
    return [nn.Flatten, lambda: Last(64, 4)]
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("way", ["restart", "resume"])
def test_a_run_grows_again_to_the_mesh_of_the_job(tmp_path: Path, way: str) -> None:
    file = write_job(tmp_path, JOB, LOSES_TWICE)
    log = tmp_path / "log.jsonl"
    for name in ("first", "second"):
        (tmp_path / name).touch()
    settings = ("--set", f"log.path={log}", "--set", f"checkpoint.dir={tmp_path / 'saved'}")
    command = (
        sys.executable,
        "-m",
        "quintsched.runtime.launch.local_run",
        "--config",
        file,
        *settings,
    )
    code, out, err = run(*command, "--restarts", "2" if way == "restart" else "1", "--min-dp", "1")
    if way == "resume":
        assert code == 4
        code, later, err = run(*command, "--resume")
        out += later
    assert code == 0, err
    assert re.findall(r"^1f1b on (dp=\d)", out, re.MULTILINE) == ["dp=2", "dp=1", "dp=2"]
    assert re.search("resumed after step [24]$", out, re.MULTILINE)
    config = load_job(file)
    plan = plan_of(config)
    expected = run_local(2, lambda transport: Trainer.of_job(config, plan, transport).fit())[0][-1]
    found = [r for r in map(json.loads, log.read_text().splitlines()) if r["event"] == "epoch"][-1]
    assert found["step"] == expected["step"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], abs=1e-5)


SLOW = MODEL.replace("return super()", "time.sleep(0.05)\n        return super()").replace(
    "import os", "import os, time"
)


def starts(log: Path) -> list[tuple[str, int]]:
    """Return the plan and the first step of each attempt that a log tells of, and the last step of all."""
    lines = log.read_text().splitlines() if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(r["plan"].split(",")[0], r["step"]) for r in records if r["event"] == "start"] + [
        ("now", r["step"]) for r in records[-1:]
    ]


def wait_for_start(log: Path, count: int) -> list[tuple[str, int]]:
    """Wait until so many attempts have begun, and the last has trained for some steps."""
    deadline = time.monotonic() + 120
    found = starts(log)
    while len(found) <= count or found[-1][1] < found[-2][1] + 4:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
        found = starts(log)
    return found[:-1]


@pytest.mark.processes
@pytest.mark.slow
def test_machines_go_and_come_under_torchrun(tmp_path: Path) -> None:
    file = write_job(tmp_path, JOB, SLOW)
    log = tmp_path / "log.jsonl"
    settings = [f"log.path={log}", f"checkpoint.dir={tmp_path / 'saved'}", "parallel.elastic=true", "train.epochs=5000"]
    given = [word for setting in settings for word in ("--set", setting)]
    with hosts(2, tmp_path) as net:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{net.addresses[0]}:29517", "--rdzv-id", "elastic"]
        where += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
        alone = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable]  # torch forgets to tell who comes later
        commands: list[list[object]] = []
        for address in net.addresses:
            own = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--local-addr", address]
            command = ["-m", "torch.distributed.run", *own, *where, "-m", "quintsched.runtime"]
            commands.append([*alone, *command, "--config", file, *given, "--resume"])
        net.start(0, *commands[0])
        second = net.start(1, *commands[1])
        wait_for_start(log, 1)
        net.signal(second, signal.SIGKILL)
        wait_for_start(log, 2)
        net.start(1, *commands[1])
        found = wait_for_start(log, 3)
    assert [plan for plan, _ in found] == ["1f1b on dp=2", "1f1b on dp=1", "1f1b on dp=2"]
    assert 0 == found[0][1] < found[1][1] < found[2][1]
