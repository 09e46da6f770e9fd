"""`quintsched doctor`: what it reports of this machine, and what it says where runs cannot start."""

import json
import os
import subprocess
import sys

import pytest

from quintsched.cli.around_runs.doctor import Finding, doctor
from quintsched.errors import MisfitError

MODULE = sys.modules["quintsched.cli.around_runs.doctor"]  # whose name is the command's as well


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "quintsched", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.processes
def test_this_machine_can_run_and_two_processes_have_met():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {"python", "torch", "devices", "threads", "interfaces", "ports", "links (cpu)"} <= set(found)
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "good")
    assert "GB/s" in found["links (cpu)"]["found"]


@pytest.mark.processes
def test_a_wrong_interface_ends_with_3_and_says_what_to_do():
    done = run(GLOO_SOCKET_IFNAME="nosuch")
    assert done.returncode == 3
    assert "no network interface 'nosuch'" in done.stdout
    assert "interfaces" in done.stderr


def test_without_torch_planning_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(MODULE.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisfitError, match="torch"):
        doctor()
    assert "pip install 'quintsched[runtime]'" in capsys.readouterr().out


def test_a_torch_that_cannot_be_imported_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (found,) = MODULE._of_torch()
    assert found == Finding("torch", "ImportError: libcudart.so.13: cannot open shared object file", *found[2:])
    assert found.state == "missing"
