"""Calibration results have the right form and order of magnitude; its processes end in any case."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from quintsched.errors import StallError
from quintsched.runtime.calibrate import machine_description, time_links, time_operations
from quintsched.runtime.comm import Transport
from quintsched.runtime.comm.clocks import now_s
from quintsched.strategies.descriptions import presets_and_files
from quintsched.strategies.descriptions.hardware import MeasuredRates

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
    assert 1e-7 < measured.kernel_s < 1e-2
    assert found.tflops["fp32"] == pytest.approx(max(measured.matmul["fp32"].rates) / 1e12)
    assert presets_and_files.find_hardware(path) == found
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.usefixtures("briefly")
def test_what_was_measured_outlives_an_interruption(monkeypatch, tmp_path, capsys):
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
    assert MeasuredRates.model_validate_json(json.dumps(kept)).matmul == found.measured.matmul
    assert [*tmp_path.iterdir()] == [file]


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
        time_links.run_processes(partial(hang, tmp_path), 2, CPU, 6.0)
    assert now_s() - begun < 20
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.slow
@pytest.mark.processes
def test_links_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_links, "PARTIES", (2,))
    found = time_links.measure_links(CPU)
    assert min(found.link.rates + found.link_work.rates + found.all_reduce[2].rates) > 0
    assert set(found.all_reduce) == set(found.all_reduce_work) == {2}
    assert found.sharing[1] == 1.0
