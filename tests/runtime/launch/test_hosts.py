"""Runs on several hosts, which are network namespaces of this machine; what another host sees of a run."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from quintsched.runtime.comm import run_local
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.settings.job_file import load_job
from quintsched.runtime.train.trainer import Trainer

from .hosted_job import ends, job_of, launch, wait_for_steps
from .hosts import hosts

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize(("count", "way"), [(2, "quintsched"), (4, "quintsched"), (2, "torchrun")])
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


def test_a_rank_that_is_killed_ends_all_hosts_with_4(tmp_path: Path) -> None:
    job = job_of(tmp_path, epochs=500)
    (tmp_path / "fuse").touch()
    with hosts(2, tmp_path) as net:
        found = ends(launch(net, job))
        assert [code for code, _, _ in found] == [4, 4]
        for _, _, err in found:
            assert "rank 3 (host host1, dp=1, pp=1) was killed by SIGKILL" in err
        assert net.pids() == []


def test_a_rank_that_is_stopped_on_another_host_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, epochs=5000)
    with hosts(2, tmp_path) as net:
        started = launch(net, job, "--set", "runtime.stall_after=2")
        wait_for_steps(tmp_path)
        assert net.start(1, "kill", "-STOP", (tmp_path / "rank-3").read_text()).wait(10) == 0
        found = ends(started)
        assert [code for code, _, _ in found] == [4, 4]
        for _, _, err in found:
            assert "rank 3 (host host1, dp=1, pp=1) does not answer, as if it were stopped" in err
        assert net.pids() == []


def test_a_run_on_hosts_is_started_again_on_all(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / "fuse").touch()
    with hosts(2, tmp_path) as net:
        found = ends(launch(net, job, "--restarts", 1, "--set", f"checkpoint.dir={tmp_path / 'saved'}"))
        assert [code for code, _, _ in found] == [0, 0], found
        assert all("restart 1 of 1" in err for _, _, err in found)


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
        deadline = time.monotonic() + 10
        while net.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert net.pids() == []


def test_a_stop_that_one_host_is_asked_for_stops_all(tmp_path: Path) -> None:
    job = job_of(tmp_path, epochs=5000)
    with hosts(2, tmp_path) as net:
        started = launch(net, job, "--set", f"checkpoint.dir={tmp_path / 'saved'}")
        wait_for_steps(tmp_path)
        net.signal(started[1], signal.SIGTERM)
        found = ends(started, 60)
        assert [code for code, _, _ in found] == [0, 0], found
        assert "stopped as asked: saved at step" in found[0][1]


def test_nothing_of_a_run_of_one_host_is_seen_from_another(tmp_path: Path) -> None:
    job = job_of(tmp_path, epochs=5000)
    with hosts(2, tmp_path) as net:
        run = net.start(0, sys.executable, "-m", "quintsched.runtime.launch.local_run", "--config", job)
        wait_for_steps(tmp_path)
        scan = net.start(1, sys.executable, "-m", __name__, net.addresses[0])
        out, err = scan.communicate(timeout=120)
        assert json.loads(out) == {"open": [], "refused": 65535}, err
        assert run.poll() is None


async def scan(address: str) -> dict[str, object]:
    """Knock at all ports of a host."""
    found: dict[str, list[int]] = {"open": [], "refused": []}

    async def knock(port: int) -> None:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 20)
            found["open"].append(port)
            writer.close()
        except ConnectionRefusedError:
            found["refused"].append(port)

    for first in range(1, 65536, 500):
        await asyncio.gather(*map(knock, range(first, min(first + 500, 65536))))
    return {"open": found["open"], "refused": len(found["refused"])}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(scan(sys.argv[1]))))
