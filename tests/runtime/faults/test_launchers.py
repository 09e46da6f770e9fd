"""The same verdicts where ranks are executed, by our launcher and by torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintsched.stalls.stall_report import StallReport

from .injection import Injection, as_arguments, place_of
from .launched import job_settings, plan_of_job

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "quintsched run": ["-c", "import sys; from quintsched.cli import main; main(sys.argv[1:])", "run"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "quintsched.runtime", "--config"],
}

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize("launcher", COMMANDS)
@pytest.mark.parametrize(
    ("kind", "rank", "phase"), [("kill", 1, "steady"), ("sleep", 2, "reduction"), ("skip_send", 0, "warm-up")]
)
def test_a_fault_is_told_by_every_launcher(tmp_path: Path, launcher: str, kind: str, rank: int, phase: str) -> None:
    plan = plan_of_job("pp=3")
    injection = Injection(kind, rank, phase, 3, place_of(plan, rank, phase, kind))  # type: ignore[arg-type]
    settings = job_settings(tmp_path, "pp=3")
    settings["runtime"]["timeout_s"] = 90.0
    (tmp_path / "job.yaml").write_text(json.dumps(settings))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FAULT": json.dumps(as_arguments(injection)),
        "FAULT_FOLDER": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *COMMANDS[launcher], str(tmp_path / "job.yaml")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    report = StallReport.load(tmp_path / "stall.json")
    assert report.ranks == (rank,), done.stderr
    assert report.culprits[0].place.index == injection.index
    assert done.returncode == (4 if launcher == "quintsched run" else 1)
    said = done.stderr.count(report.words().splitlines()[0])
    assert said == 1 if launcher == "quintsched run" else said >= 1  # the launcher says it, and nobody else
    assert "Traceback" not in done.stderr or launcher == "torchrun"
