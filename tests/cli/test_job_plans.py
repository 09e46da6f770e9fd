"""`quintsched compile job.yaml`: the plan of a run, and what is refused beside it; `doctor`: whether runs can start."""

import json
import sys

import pytest

import quintsched as qs
from quintsched.cli.run_commands.doctor import doctor
from quintsched.runtime import load_job, plan_of
from quintsched.runtime.launch.show_job import main as show_job

from ..helpers.commands import run

JOB = """
model: {name: vit, options: {hidden: 16, depth: 4, heads: 2}}
parallel: {mesh: "dp=2,pp=2", schedule: interleaved-1f1b, chunks: 2, microbatches: 4, zero: 1}
train: {batch_size: 32}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.mark.processes
def test_the_plan_is_that_of_the_run(cli, job, tmp_path):
    done = cli("compile", job, "--set", "parallel.microbatches=8", "-o", "plan.json")
    assert done.out.startswith("plan.json: interleaved-1f1b on dp=2,pp=2, 8 microbatches, 2 chunks, ZeRO-1\nsound: ")
    expected = plan_of(load_job(job, ["parallel.microbatches=8"]))
    assert qs.Plan.load(tmp_path / "plan.json") == expected
    assert plan_of(load_job(job, ["parallel.microbatches=8"]), "plan.json") == expected


def test_a_choice_is_written_with_its_reasons(job, capsys):
    auto = {"auto": {"world": 4, "hardware": "a100-80gb", "axes": {"cp": 1, "tp": 1, "ep": 1}}}
    request = {"config": str(job), "set": [f"parallel={json.dumps(auto)}"]}
    assert show_job([json.dumps({**request, "what": "plan"})]) == 0
    out, err = capsys.readouterr()
    assert qs.Plan.from_json(out).mesh.size == 4
    assert err.startswith("parallel: auto: ")


def test_options_beside_a_job_are_refused(refused, job):
    message = refused(2, "compile", job, "--chunks", 2)
    assert "--chunks beside a job file" in message
    assert "--set parallel.chunks=…" in message
    for arguments, words in (
        ((job, "--dp", 2), "--set parallel.mesh=…"),
        ((job, "--zero", 0), "--zero beside a job file"),  # its default too
        ((job, "--print-after", "all"), "--print-after is for a plan"),
        ((job, "-o", job), "the command reads this file"),
        (("plan.json",), "plan.json: compile takes a job file (.yaml or .yml)"),
        (("-s", "1f1b", "--pp", 2, "-m", 4, "--set", "train.seed=1"), "--set overrides a setting of a job file"),
    ):
        assert words in refused(2, "compile", *arguments)


MODULE = sys.modules["quintsched.cli.run_commands.doctor"]  # whose name is the command's as well
DOCTOR = (sys.executable, "-m", "quintsched", "doctor")


@pytest.mark.processes
def test_this_machine_can_run_and_two_processes_have_met(cli):
    found = {finding["name"]: finding for finding in cli("doctor", "--json").data}
    assert {"python", "torch", "devices", "threads", "interfaces", "ports", "links (cpu)"} <= set(found)
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "good")
    assert "GB/s" in found["links (cpu)"]["found"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_wrong_interface_ends_with_3(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    code, out, err = run(*DOCTOR)
    assert code == 3
    assert "no network interface 'nosuch'" in out
    assert "interfaces" in err


def test_without_torch_planning_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(MODULE.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(qs.MisfitError, match="torch"):
        doctor()
    assert "pip install 'quintsched[runtime]'" in capsys.readouterr().out
