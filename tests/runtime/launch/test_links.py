"""Links between hosts that are cut, healed and slowed under a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quintsched.stalls.stall_report import StallReport

from .hosted_job import MODEL, ends, job_of, launch, wait_for_steps
from .hosts import Hosts, hosts

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CUT_OFF = "cannot reach the host of rank 0: the link between them is cut, or that host is gone"


def wait_for_end(net: Hosts) -> list[int]:
    """Return the processes that are left on the hosts a while after the launchers' end."""
    deadline = time.monotonic() + 10
    while net.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    return net.pids()


@pytest.mark.parametrize(("count", "cut"), [(2, 1), (2, 0), (4, 2), (4, 0)])
def test_a_cut_link_ends_all_hosts_and_nobody_else_is_named(tmp_path: Path, count: int, cut: int) -> None:
    job = job_of(tmp_path, epochs=5000)
    with hosts(count, tmp_path) as net:
        started = launch(net, job)
        wait_for_steps(tmp_path)
        net.cut(cut)
        found = ends(started, 90)
        assert [code for code, _, _ in found] == [4] * count
        assert wait_for_end(net) == []
    said = [err for _, _, err in found]
    is_known = count > 2 and cut > 0
    assert StallReport.load(tmp_path / "stall.json").ranks == ((cut,) if is_known else ())
    for number, words in enumerate(said):
        if (number == cut) if cut else (number > 0):
            assert f"(host host{number}) {CUT_OFF}" in words
        elif is_known:
            assert f"rank {cut} (host host{cut}, dp=1, pp=0) cannot be reached; it was last heard of" in words
        else:
            assert "error: nobody can be told from the others: host host0 and host host1" in words


def trained(net: Hosts, folder: Path, job: Path, seconds: float = 0.0) -> bytes:
    """Return the weights of a run whose link is cut for so long in the middle."""
    for file in folder.glob("rank-*"):
        file.unlink()
    started = launch(net, job, "--set", f"checkpoint.export={folder / 'out'}")
    wait_for_steps(folder)
    if seconds:
        net.cut(1)
        time.sleep(seconds)
        assert all(process.poll() is None for process in started)
        net.cut(1, healed=True)
    found = ends(started)
    assert [code for code, _, _ in found] == [0, 0], [err for _, _, err in found]
    return b"".join(path.read_bytes() for path in sorted((folder / "out").glob("*.safetensors")))


def test_a_link_that_heals_in_time_costs_nothing_but_time(tmp_path: Path) -> None:
    job = job_of(tmp_path, epochs=12)
    (tmp_path / "model.py").write_text(MODEL.replace("return super()", "time.sleep(0.02)\n        return super()"))
    with hosts(2, tmp_path) as net:
        weights = trained(net, tmp_path, job, seconds=4.0)
        assert weights
        assert weights == trained(net, tmp_path, job)


def test_a_slow_link_aborts_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with hosts(2, tmp_path) as net:
        net.slow(1, kbit=400)
        weights = trained(net, tmp_path, job)
        net.slow(1)
        assert weights == trained(net, tmp_path, job)
