"""Ray Train on two nodes, which are two raylets: a killed worker, a drained node; and on one node."""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from .engine_runs import EXAMPLES, JOB, VERDICT, WAIT_S, EngineRun, free_port, plain_run, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(1200)]
NODES = "import ray; ray.init(logging_level='error'); print(*(n['NodeID'] for n in ray.nodes() if n['Alive']))"


class RayCluster:
    """Raylets of this machine, two processors each, and a head that has two as well; or a head alone, with all four.

    Each has an address of its own. The driver's is the head's, which Ray Train's controller shares.
    """

    def __init__(self, stack: ExitStack, run: EngineRun, nodes: int = 2) -> None:
        port = free_port()
        self._stack, self._run, self._ray = stack, run, Path(sys.executable).with_name("ray")
        self.told = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "token", "no_proxy": "*"}
        self.told |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_DEDUP_LOGS": "0"}
        self.told |= {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60"}
        sockets = stack.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))  # short: a limit
        places = ["--temp-dir", sockets, "--include-dashboard=false"]
        self._cpus = 4 // nodes
        self._start("head", "127.0.0.1", "--head", f"--port={port}", *places)
        if nodes == 2:
            self.second = self.add_node("second", "127.0.0.2")

    def _start(self, name: str, address: str, *how: str | Path) -> subprocess.Popen[bytes]:
        flags = (f"--num-cpus={self._cpus}", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0")
        command = (self._ray, "start", f"--node-ip-address={address}", *flags)
        started = self._run.started(*command, "--block", *how, log=f"{name}.txt", **self.told)
        process = self._stack.enter_context(started)
        wait_until(lambda: "Ray runtime started" in self._run.said(f"{name}.txt"), f"the node {name}")
        return process

    def add_node(self, name: str, address: str) -> subprocess.Popen[bytes]:
        """Start a further node."""
        return self._start(name, address, f"--address={self.told['RAY_ADDRESS']}")

    def nodes(self) -> list[str]:
        """Return the numbers of the nodes."""
        return self._ask(sys.executable, "-c", NODES).split()

    def drain(self, node: str) -> None:
        """Announce that a node will be taken away."""
        how = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds")
        self._ask(self._ray, "drain-node", "--address", self.told["RAY_ADDRESS"], "--node-id", node, *how, "300")

    def _ask(self, *command: str | Path) -> str:
        environment = self._run.environment | self.told
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def cluster(run: EngineRun, request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    pytest.importorskip("ray.train", reason="needs pip install 'ray[train]'")
    with ExitStack() as stack:
        yield RayCluster(stack, run, getattr(request, "param", 2))


def test_a_killed_worker_and_a_drained_node_change_no_weight(run: EngineRun, cluster, tmp_path_factory) -> None:
    run = replace(run, epochs=12)  # a node takes some seconds to come
    expected = plain_run(replace(run, folder=tmp_path_factory.mktemp("long"))).weights()
    (_head, *others) = cluster.nodes()
    storage = ("--storage", run.folder / "storage")
    with run.started(sys.executable, EXAMPLES / "ray_train.py", JOB, *storage, *run.options, **cluster.told) as driver:
        wait_until(lambda: "Attempting to start training worker group" in run.said(), "places on both nodes")
        cluster.add_node("third", "127.0.0.3")
        wait_until(lambda: "Started training worker group" in run.said(), "workers on both nodes")
        cluster.drain(others[0])
        wait_until(lambda: len(run.steps_of("start")) > 1, "a second attempt, without the drained node")
        (stopped,) = run.steps_of("stop")
        run.wait_for_step(stopped + 12)
        workers = re.findall(r"pid=(\d+)\) world_rank=3", run.said())
        os.kill(int(workers[-1]), signal.SIGKILL)
        assert driver.wait(WAIT_S) == 0, run.said()
    assert re.search(VERDICT, run.said())
    run.require_one_end(expected, stopped)


def test_a_run_goes_on_with_the_workers_of_the_nodes_that_are_left(run: EngineRun, cluster, plain: EngineRun) -> None:
    how = ("--storage", run.folder / "storage", "--min-workers", "2")
    with run.started(sys.executable, EXAMPLES / "ray_train.py", JOB, *how, *run.options, **cluster.told) as driver:
        run.wait_for_step(12)
        os.killpg(cluster.second.pid, signal.SIGKILL)
        assert driver.wait(2 * WAIT_S) == 0, run.said()
    run.require_fewer_replicas(plain)


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_one_node_ends_with_the_same_weights(run: EngineRun, cluster: RayCluster, expected: str) -> None:
    storage = ("--storage", run.folder / "storage")
    with run.started(sys.executable, EXAMPLES / "ray_train.py", JOB, *storage, *run.options, **cluster.told) as driver:
        assert driver.wait(WAIT_S) == 0, run.said()
    run.require_one_end(expected)
