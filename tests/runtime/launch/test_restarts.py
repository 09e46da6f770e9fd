"""Runs that are stopped, lose ranks, and are started again: saved, to the same figures, or with fewer replicas."""

import json
import re
import sys
from pathlib import Path

import pytest

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import JobConfig, Trainer, load_job, run_local
from quintsched.runtime.launch.job_plan import Worlds, for_processes, plan_of, smaller_worlds

from ...helpers.commands import run
from ...helpers.jobs import Sections, write_job
from .losing_model import losing

JOB: Sections = {
    "parallel": {"mesh": "dp=2"},
    "train": {"epochs": 2, "optimizer": {"name": "adam", "lr": 3e-3}},
    "checkpoint": {"every": 2},
    "log": {"every": 1},
}
WAYS = {
    "quintsched": ("quintsched.runtime.launch.local_run",),
    "torchrun": ("torch.distributed.run", "--nproc-per-node=2", "-m", "quintsched.runtime"),
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("launcher", WAYS)
def test_a_killed_rank_is_started_again_and_the_run_goes_on_from_the_last_step(tmp_path: Path, launcher: str) -> None:
    file = write_job(tmp_path, losing({"1": 7}), JOB)
    again = {"torchrun": "--max-restarts=1", "quintsched": "--restarts=1"}[launcher]
    command, *more = WAYS[launcher]
    (tmp_path / "fuse-1").touch()
    code, out, err = run(sys.executable, "-m", command, again, *more, "--config", file, *outputs_in(tmp_path))
    assert code == 0, err
    assert not (tmp_path / "fuse-1").exists()
    assert re.search("resumed after step [46]$", out, re.MULTILINE)  # step 6 may still have been on its way to the disk
    found, expected = last_epochs(tmp_path, file)
    assert found == expected


def outputs_in(folder: Path) -> list[str]:
    return ["--set", f"log.path={folder / 'log.jsonl'}", "--set", f"checkpoint.dir={folder / 'saved'}"]


def last_epochs(folder: Path, file: Path) -> list[dict[str, float]]:
    """Return the last epoch's figures in the log, and those of a run of the job in this process."""
    config = load_job(file)
    plan = plan_of(config)
    expected = run_local(2, lambda transport: Trainer.of_job(config, plan, transport).fit())[0][-1]
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    found = [record for record in records if record["event"] == "epoch"][-1]
    return [{name: one[name] for name in ("step", "loss", "validation_loss")} for one in (found, expected)]


def job(mesh: str, **parallel: object) -> JobConfig:
    settings = {"mesh": mesh, "microbatches": 2, "elastic": True} | parallel
    return JobConfig.model_validate({"parallel": settings, "train": {"batch_size": 48}})


def test_dp_is_what_the_processes_make_or_they_are_refused() -> None:
    for mesh, processes, expected in (
        ("dp=4,pp=2", 2, "dp=1,pp=2"),
        ("pp=2,dp=2,tp=2", 12, "pp=2,dp=3,tp=2"),
        ("pp=2", 4, "dp=2,pp=2"),
    ):
        assert str(plan_of(for_processes(job(mesh), None, processes)).mesh) == expected
        assert for_processes(job(mesh, elastic=False), None, processes).parallel.mesh == mesh
    with pytest.raises(MisfitError, match=r"5 processes make no whole replica of 2 ranks, .* start 4"):
        for_processes(job("dp=4,pp=2"), None, 5)
    with pytest.raises(UsageError, match=r"parallel\.elastic compiles a plan"):
        for_processes(job("dp=2"), "plan.json", 2)


def test_smaller_worlds_divide_the_batch_and_the_machines() -> None:
    whole = job("dp=4,pp=2")
    plan = plan_of(whole)
    found = [smaller_worlds(whole, plan, least, machines=machines) for least, machines in ((1, 1), (2, 1), (1, 4))]
    assert found == [[8, 6, 4, 2], [8, 6, 4], [8, 4]]
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


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_grows_again_to_the_mesh_of_the_job(tmp_path: Path) -> None:
    file = write_job(tmp_path, losing({"0": 5, "1": 2}), JOB)
    for rank in ("0", "1"):
        (tmp_path / f"fuse-{rank}").touch()
    command = (sys.executable, "-m", "quintsched.runtime.launch.local_run", "--config", file, *outputs_in(tmp_path))
    code, out, err = run(*command, "--restarts", "2", "--min-dp", "1")
    assert code == 0, err
    assert re.findall(r"^1f1b on (dp=\d)", out, re.MULTILINE) == ["dp=2", "dp=1", "dp=2"]
    assert re.search("resumed after step [24]$", out, re.MULTILINE)
    found, expected = last_epochs(tmp_path, file)
    assert found == pytest.approx(expected, abs=1e-5)


STOPPED_MODEL = """
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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "whom", "number"),  # SIGUSR1 to a rank, every day: test_processes.py
    [("quintsched", "launcher", "SIGTERM"), ("torchrun", "rank", "SIGTERM"), ("torchrun", "launcher", "SIGINT")],
)
def test_a_signal_lets_the_run_save_and_end_with_0(tmp_path: Path, launcher: str, whom: str, number: str) -> None:
    pid = PIDS.get(whom) or PIDS[f"launcher of {launcher}"]
    saving = {"dir": f"{tmp_path}/saved", "every": 1_000_000}
    parallel, endless = {"mesh": "pp=2", "microbatches": 2}, {"epochs": 1000}
    model = STOPPED_MODEL.replace("WHOM", pid).replace("SIGNAL", number)
    job = write_job(tmp_path, model, {"parallel": parallel, "train": endless, "checkpoint": saving})
    code, out, err = run(sys.executable, "-m", *WAYS[launcher], "--config", job)
    found = re.search(r"^stopped as asked: saved at step (\d+)$", out, re.MULTILINE)
    assert found is not None, err
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == [f"step-{int(found[1]):08d}"]
    if whom == "rank":
        assert found[1] == "3"
    assert code == (1 if (launcher, whom) == ("torchrun", "launcher") else 0)  # torchrun says so of any signal it gets
    assert "Traceback" not in err or launcher == "torchrun"
