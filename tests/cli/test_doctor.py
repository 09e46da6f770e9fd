"""`quintsched doctor`: what it reports of this machine, and what it says where runs cannot start."""

import json
import subprocess
import sys

import pytest

from quintsched.cli.run_commands.doctor import doctor
from quintsched.errors import MisfitError

MODULE = sys.modules["quintsched.cli.run_commands.doctor"]  # whose name is the command's as well


def run(*arguments):
    command = [sys.executable, "-m", "quintsched", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.processes
def test_this_machine_can_run_and_two_processes_have_met():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {"python", "torch", "devices", "threads", "interfaces", "ports", "links (cpu)"} <= set(found)
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "good")
    assert "GB/s" in found["links (cpu)"]["found"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_wrong_interface_ends_with_3(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    done = run()
    assert done.returncode == 3
    assert "no network interface 'nosuch'" in done.stdout
    assert "interfaces" in done.stderr


def test_without_torch_planning_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(MODULE.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisfitError, match="torch"):
        doctor()
    assert "pip install 'quintsched[runtime]'" in capsys.readouterr().out
