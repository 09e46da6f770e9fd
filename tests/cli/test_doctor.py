"""`quintsched doctor`: what it reports of this machine, and what it says where runs cannot start."""

import json
import subprocess
import sys

import pytest

from quintsched.cli.run_commands.doctor import Finding, doctor
from quintsched.errors import MisfitError
from quintsched.runtime.calibrate import doctor_facts

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


def test_a_wrong_interface_is_missing_and_it_is_said_what_to_do(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    found = {row[0]: Finding(*row) for row in doctor_facts._network()}["interfaces"]
    assert (found.state, found.advice) == ("missing", "unset it, or name one of these")
    assert "no network interface 'nosuch'" in found.found


@pytest.mark.slow
@pytest.mark.processes
def test_a_wrong_interface_ends_with_3(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    done = run()
    assert done.returncode == 3
    assert "no network interface 'nosuch'" in done.stdout
    assert "interfaces" in done.stderr


def test_a_torchvision_of_another_torch_is_noted(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    (row,) = doctor_facts._torchvision()
    found = Finding(*row)
    assert (found.state, found.found) == ("note", "operator torchvision::nms does not exist")
    assert "Import quintsched.runtime's Engine, Trainer or split before them" in found.advice


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
