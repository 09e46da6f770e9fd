"""Runs on several hosts, which are network namespaces of this machine; links that are cut, healed and slowed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintsched.runtime import Trainer, load_job, plan_of, run_local
from quintsched.stalls.stall_report import StallReport

from ...helpers.commands import until
from ...helpers.jobs import Sections, write_job
from .hosts import Hosts, hosts
from .losing_model import losing

pytestmark = [pytest.mark.processes, pytest.mark.slow]
CUT_OFF = "cannot reach the host of rank 0: the link between them is cut, or that host is gone"


@pytest.mark.parametrize(("count", "way"), [(4, "quintsched"), (2, "torchrun")])
def test_hosts_train_as_one_process_does(tmp_path: Path, count: int, way: str) -> None:
    job, log = job_of(tmp_path), tmp_path / "log.jsonl"
    with hosts(count, tmp_path) as net:
        found = ends(launch(net, job, "--set", f"log.path={log}", way=way))
        assert [code for code, _, _ in found] == [0] * count, [err for _, _, err in found]
    config = load_job(job)
    plan = plan_of(config)
    expected = run_local(4, lambda transport: Trainer.of_job(config, plan, transport).fit())[0][-1]
    told = [r for r in map(json.loads, log.read_text().splitlines()) if r["event"] == "epoch"][-1]
    assert told["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_killed_ends_all_hosts_with_4_or_is_started_again_on_all(tmp_path: Path, restarts: int) -> None:
    job = job_of(tmp_path)
    (tmp_path / "fuse-3").touch()
    with hosts(2, tmp_path) as net:
        found = ends(launch(net, job, "--restarts", restarts, "--set", f"checkpoint.dir={tmp_path / 'saved'}"))
        assert [code for code, _, _ in found] == ([0, 0] if restarts else [4, 4]), found
        words = "restart 1 of 1" if restarts else "rank 3 (host host1, dp=1, pp=1) was killed by SIGKILL"
        assert all(words in err for _, _, err in found)
        until(lambda: not net.pids(), 10)


@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_that_is_killed_ends_all_hosts(tmp_path: Path, number: int) -> None:
    job = job_of(tmp_path, epochs=5000)
    with hosts(2, tmp_path) as net:
        started = launch(net, job)
        wait_for_steps(tmp_path)
        net.signal(started[number], signal.SIGKILL)
        codes = [code for code, _, _ in ends(started, 60)]
        assert codes[number] == -signal.SIGKILL
        assert codes[1 - number] == 4
        until(lambda: not net.pids(), 10)


@pytest.mark.parametrize(("count", "cut"), [(2, 0), (4, 2)])
def test_a_cut_link_ends_all_hosts_and_nobody_else_is_named(tmp_path: Path, count: int, cut: int) -> None:
    job = job_of(tmp_path, epochs=5000)
    with hosts(count, tmp_path) as net:
        started = launch(net, job)
        wait_for_steps(tmp_path)
        net.cut(cut)
        found = ends(started, 90)
        assert [code for code, _, _ in found] == [4] * count
        until(lambda: not net.pids(), 10)
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


MODEL = losing({"3": 3})


def job_of(folder: Path, epochs: int = 1) -> Path:
    parallel, rarely = {"mesh": "dp=2,pp=2", "microbatches": 2}, {"every": 1_000_000}
    more: Sections = {"parallel": parallel, "train": {"epochs": epochs}, "checkpoint": rarely, "log": {"every": 1}}
    return write_job(folder, MODEL, more)


def launch(net: Hosts, job: Path, *more: object, way: str = "quintsched") -> list[subprocess.Popen[str]]:
    """Start a run with a launcher on each host."""
    started, count, port = [], len(net.names), 29517
    for number in range(count):
        where = ["--nnodes", count, "--node-rank", number]
        if way == "quintsched":
            command = ["quintsched.runtime.launch.local_run", *where, "--master", f"{net.addresses[0]}:{port}"]
        else:
            where += ["--nproc-per-node", 4 // count, "--master-addr", net.addresses[0], "--master-port", port]
            command = ["torch.distributed.run", *where, "-m", "quintsched.runtime"]
        started.append(net.start(number, sys.executable, "-m", *command, "--config", job, *more))
    return started


def ends(started: list[subprocess.Popen[str]], timeout_s: float = 120) -> list[tuple[int, str, str]]:
    deadline = time.monotonic() + timeout_s
    found = []
    for process in started:
        out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
        found.append((process.returncode, out, err))
    return found


def wait_for_steps(folder: Path) -> None:
    """Wait until the ranks of the last stage, 1 and 3, are in their second step."""
    until(lambda: len([*folder.glob("rank-*")]) >= 2, 90)
