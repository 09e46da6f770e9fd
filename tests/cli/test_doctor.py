"""`quintsched doctor`: what it reports of this machine, and what it says where runs cannot start."""

import json
import sys

import pytest

from quintsched.cli.run_commands.doctor import doctor
from quintsched.errors import MisfitError

from ..helpers.commands import run

MODULE = sys.modules["quintsched.cli.run_commands.doctor"]  # whose name is the command's as well


DOCTOR = (sys.executable, "-m", "quintsched", "doctor")


@pytest.mark.processes
def test_this_machine_can_run_and_two_processes_have_met():
    code, out, err = run(*DOCTOR, "--json")
    assert code == 0, err
    found = {finding["name"]: finding for finding in json.loads(out)}
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
    with pytest.raises(MisfitError, match="torch"):
        doctor()
    assert "pip install 'quintsched[runtime]'" in capsys.readouterr().out
