"""Jobs that `quintsched run` starts give the numbers of one process."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import DATA, run

from .machine import Machine

pytestmark = [pytest.mark.processes]
LIMIT_S = 240

JOB = """
model: {options: {hidden: 32, depth: 6, heads: 4}}
data: {name: "DATA:load"}
train: {epochs: 2, batch_size: 16, optimizer: {name: sgd, lr: 0.05, momentum: 0.9}, clip: 1.0}
runtime: {timeout_s: 120, precision: float64}
log: {every: 1}
"""


def losses(machine: Machine, job: Path, log: Path, *settings: str) -> list[float]:
    sets = [part for setting in (*settings, f"log.path={log}") for part in ("--set", setting)]
    command = (sys.executable, "-m", "quintsched.runtime.launch.local_run", "--config", job, *sets)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment(8).items():
            patch.setenv(name, value)
        code, _, err = run(*command, timeout_s=LIMIT_S)
    assert code == 0, err
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "data.py").write_text(DATA)
    (folder / "job.yaml").write_text(JOB.replace("DATA", str(folder / "data.py")))
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def alone(machine: Machine, job: Path) -> list[float]:
    """Return the losses of one process on the CPU."""
    return losses(machine, job, job.with_name("alone.jsonl"), "runtime.transport=gloo")


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        pytest.param("pp=2", "1f1b", marks=pytest.mark.ranks(2)),
        pytest.param("pp=4", "interleaved-1f1b", marks=pytest.mark.ranks(4)),
        pytest.param("dp=2,pp=2,tp=2", "1f1b", marks=pytest.mark.ranks(8)),
    ],
)
def test_losses_equal_one_process(tmp_path: Path, machine: Machine, job: Path, alone, mesh: str, schedule: str) -> None:
    how = (f"parallel.mesh='{mesh}'", f"parallel.schedule={schedule}", "parallel.microbatches=4")
    found = losses(machine, job, tmp_path / "found.jsonl", *how, f"runtime.transport={machine.backend}")
    assert found == pytest.approx(alone, abs=1e-10)
