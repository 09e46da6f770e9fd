"""Calibration results have the right form and order of magnitude; its processes end in any case."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from quintsched.errors import InputError, MisfitError, StallError, UsageError
from quintsched.runtime.calibrate import machine_description, time_links, time_operations
from quintsched.runtime.calibrate.time_links import run_processes
from quintsched.runtime.comm import Transport
from quintsched.runtime.comm.clocks import now_s
from quintsched.strategies.commands.calibrate import calibrate_first
from quintsched.strategies.descriptions import presets_and_files
from quintsched.strategies.descriptions.hardware import Measured

CPU = torch.device("cpu")


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small sizes, for a moment."""
    monkeypatch.setattr(time_operations, "BUDGET_S", 0.002)
    for name, sizes in (("EDGES", (16, 32)), ("LENGTHS", (16, 32)), ("ELEMENTS", (2**12,)), ("STEPPED", (2**10,))):
        monkeypatch.setattr(time_operations, name, {False: sizes})
    monkeypatch.setattr(machine_description, "measure_links", lambda _: None)


@pytest.mark.usefixtures("briefly")
def test_a_description_of_this_machine_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    found = machine_description.calibrate(CPU, path)
    measured = found.measured
    assert measured.cores == time_links.count_cores() >= 1
    assert set(measured.matmul) == {"bf16", "fp16", "fp32", "fp64"} == set(measured.attention)
    assert measured.kernel_s is not None
    assert 1e-7 < measured.kernel_s < 1e-2
    assert found.tflops["fp32"] == pytest.approx(max(measured.matmul["fp32"].rates) / 1e12)
    assert presets_and_files.find_hardware(path) == found
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.usefixtures("briefly")
def test_what_was_measured_outlives_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, partial = tmp_path / "mine.json", tmp_path / "mine.json.partial"

    def interrupted(_: torch.device) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time_operations, "memory_curve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine_description.calibrate(CPU, file)
    assert not file.exists()
    said = json.loads(partial.read_text())
    assert said["missing"] == ["memory and optimizer", "messages and sums between processes"]
    assert set(said["measured"]) == {"matrix products", "attention"}
    assert f"kept in {partial}; the same command measures what is missing: memory" in capsys.readouterr().err
    monkeypatch.setattr(time_operations, "matmul_curves", interrupted)  # not measured again
    found = machine_description.calibrate(CPU, file)
    assert f"going on with what {partial} has: matrix products, attention" in capsys.readouterr().err
    kept = {"matmul": said["measured"]["matrix products"]["matmul"]}
    assert Measured.model_validate_json(json.dumps(kept)).matmul == found.measured.matmul
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.usefixtures("briefly")
def test_parts_of_another_machine_are_measured_anew_and_nonsense_is_refused(tmp_path: Path) -> None:
    file, partial = tmp_path / "mine.json", tmp_path / "mine.json.partial"
    partial.write_text('{"machine": "another", "missing": [], "measured": {"attention": {}}}')
    assert machine_description.MeasuredParts(file, CPU).done == []
    assert machine_description.MeasuredParts(file, CPU).missing == list(machine_description.PARTS)
    ours = machine_description.MeasuredParts(file, CPU)._machine
    for text in ("{", "[]", "{}", json.dumps({"machine": ours, "measured": {"attention": {"matmul": 3}}})):
        partial.write_text(text)
        with pytest.raises(InputError, match=r"mine.json.partial: not what calibrate has left .* remove it"):
            machine_description.calibrate(CPU, file)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(MisfitError, match="choose --device cpu"):
        machine_description.calibrate(torch.device("meta"), Path("meta.json"))


def test_a_quota_counts_as_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(time_links, "QUOTA", quota)
    everything = time_links.count_cores()
    for content, number in (("max 100000", everything), ("100000 100000", 1), ("nonsense", everything)):
        quota.write_text(content)
        assert time_links.count_cores() == number


def test_hardware_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, measured = tmp_path / "quintsched" / "cpu.json", []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = import_module("quintsched.strategies.commands.calibrate")
    monkeypatch.setattr(command, "_measure", lambda *what: measured.append(what) or file.touch() or 0)
    for hardware in ("a100-80gb", "cpu", "cpu"):
        calibrate_first(hardware)
    assert measured == [(file, "cpu")]


def hang(folder: Path, transport: Transport) -> int:
    """Have one rank end, and the other wait for it forever."""
    (folder / str(transport.rank)).write_text(str(os.getpid()))
    group = transport.make_group([(0, 1)])
    if transport.rank:
        group.all_reduce(torch.zeros(1)).wait()
    return 0


@pytest.mark.processes
def test_processes_that_hang_end_with_the_call(tmp_path: Path) -> None:
    begun = now_s()
    with pytest.raises(StallError, match="longer than 6 s"):
        run_processes(partial(hang, tmp_path), 2, CPU, 6.0)
    assert now_s() - begun < 20
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.slow
@pytest.mark.processes
def test_links_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_links, "PARTIES", (2,))
    found = time_links.measure_links(CPU)
    assert found is not None
    assert min(found.link.rates + found.link_work.rates + found.all_reduce[2].rates) > 0
    assert set(found.all_reduce) == set(found.all_reduce_work) == {2}
    assert found.sharing[1] == 1.0


@pytest.mark.usefixtures("briefly")
def test_nothing_is_measured_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        machine_description.calibrate(CPU, tmp_path / "file" / "mine.json")
