"""Faults in real processes: the rank and the instruction are named, nobody else ever is, and nothing is left."""

import json
import os
import sys
from pathlib import Path

import pytest

from quintsched.stalls.stall_report import StallReport

from ...helpers.commands import run
from .injection import ENDS, Injection, Kind, Phase, all_injections, as_arguments, place_of
from .judged import judge_all
from .launched import job_settings, plan_of_job

ROOT = Path(__file__).parents[3]

CRASH_S = 2.0
"""Time limit for the report of a crash, in seconds."""

CODES = {"raise": (1,), "skip_recv": (3, 4), "odd": (3,)}
"""The exit codes of runs: 4, but for errors of the culprit itself, such as that a message left over does not fit."""

QUICK: tuple[tuple[Kind, int, Phase, int], ...] = (
    ("kill", 1, "steady", 0), ("raise", 1, "save", 0), ("exit5", 0, "set-up", 0),
    ("odd", 2, "set-up", 0), ("exit0", 2, "optimizer", 0),
    ("stop", 2, "warm-up", 0), ("sleep", 1, "reduction", 0), ("skip_send", 0, "warm-up", 0),
    ("skip_recv", 1, "cool-down", 1), ("large", 2, "steady", 0), ("other", 1, "cool-down", 0),
)  # fmt: skip
"""Kind, rank, phase and number of the place: each kind that differs in what is seen of it, and each phase."""


def injection_of(kind: Kind, rank: int, phase: Phase, nth: int = 0) -> Injection:
    place = None if phase in ("set-up", "save") else place_of(plan_of_job("pp=3"), rank, phase, kind, nth)
    return Injection(kind, rank, phase, 3 if place is None else 2, place)


@pytest.mark.processes
def test_a_fault_of_each_kind_is_told_and_named(tmp_path: Path) -> None:
    judged = judge_all([injection_of(*one) for one in QUICK], tmp_path, "pp=3", at_once=3)
    for one in judged:
        assert one.placed, f"{one.injection}\n{one.said}"
        assert not one.left
        assert one.code in CODES.get(one.injection.kind, (4,)), one.said
        assert one.told_s is not None


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("mesh", "schedule"), [("dp=2,pp=2", "1f1b"), ("pp=4", "zb-h1"), ("pp=2,tp=2", "1f1b")])
def test_faults_of_other_meshes(tmp_path: Path, mesh: str, schedule: str) -> None:
    """Of which `benchmarks/faults.py` tries three hundred, with links that are cut, as `launch/test_hosts.py` does."""
    injections = all_injections(plan_of_job(mesh, schedule), 24, seed=len(mesh))
    judged = judge_all(injections, tmp_path, mesh, schedule=schedule, at_once=2)
    assert not [one for one in judged if one.wrong or one.left or one.silent]
    assert sum(one.placed for one in judged) >= len(judged) - 1
    late = [one for one in judged if one.injection.kind in ENDS and (one.told_s is None or one.told_s > CRASH_S)]
    assert len(late) <= 1, late


COMMANDS = {
    "quintsched run": ["-c", "import sys; from quintsched.cli import main; main(sys.argv[1:])", "run"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "quintsched.runtime", "--config"],
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("launcher", COMMANDS)
def test_a_fault_is_told_by_every_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """By ranks that are executed, not forked, by our launcher and by torchrun."""
    injection = injection_of("skip_send", 0, "warm-up")
    settings = job_settings(tmp_path, "pp=3")
    settings["runtime"]["timeout_s"] = 90.0
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(json.dumps(settings))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("FAULT", json.dumps(as_arguments(injection)))
    monkeypatch.setenv("FAULT_FOLDER", str(tmp_path))
    code, _, err = run(sys.executable, *COMMANDS[launcher], tmp_path / "job.yaml", timeout_s=180)
    report = StallReport.load(tmp_path / "stall.json")
    assert report.ranks == (0,), err
    assert report.culprits[0].place.index == injection.index
    assert code == (4 if launcher == "quintsched run" else 1)
    said = err.count(report.words().splitlines()[0])
    assert said == 1 if launcher == "quintsched run" else said >= 1  # the launcher says it, and nobody else
    assert "Traceback" not in err or launcher == "torchrun"
