"""torchrun, and TorchX by its local scheduler, on two nodes of this machine: a stop, a killed rank; and on one node."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .engine_runs import EXAMPLES, JOB, VERDICT, WAIT_S, EngineRun, free_port

pytestmark = [
    *(pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)),
    pytest.mark.parametrize("launcher", ["torchrun", pytest.param("torchx", marks=pytest.mark.engines)]),
]


@contextmanager
def started(run: EngineRun, launcher: str, log: str, nodes: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start four ranks: torchrun's agents, one a node, or TorchX for all nodes; logs are LOG-0.txt, LOG-1.txt, …"""
    ranks, port = str(4 // nodes), free_port()
    with ExitStack() as stack:
        if launcher == "torchrun":
            told = {"MASTER": f"127.0.0.1:{port}", "NODES": str(nodes), "RANKS": ranks, "ADDRESS": "127.0.0.1"}
            commands = [(EXAMPLES / "torchrun.sh", JOB, *run.options)] * nodes
        else:
            pytest.importorskip("torchx", reason="needs pip install torchx")
            told, torchx = {}, Path(sys.executable).with_name("torchx")
            how = ("--scheduler", "local_cwd", "--scheduler_args", f"log_dir={run.folder / 'logs'}", "--wait")
            sizes = ("--job", JOB, "--j", f"{nodes}x{ranks}", "--port", str(port))
            commands = [(torchx, "run", *how, f"{EXAMPLES / 'torchx_component.py'}:train", *sizes, "--", *run.settings)]
        yield [
            stack.enter_context(run.started(*command, log=f"{log}-{number}.txt", **told))
            for number, command in enumerate(commands)
        ]


def test_a_stop_and_a_killed_rank_change_no_weight(run: EngineRun, expected: str, launcher: str) -> None:
    with started(run, launcher, "first") as agents:
        run.wait_for_step(12)
        of_ranks = [pid for rank in range(4) for pid in run.rank_processes(rank)]
        for pid in [agent.pid for agent in agents] if launcher == "torchrun" else of_ranks:
            os.kill(pid, signal.SIGTERM)
        for agent in agents:
            agent.wait(WAIT_S)
    (stopped,) = run.steps_of("stop")
    with started(run, launcher, "second") as agents:
        run.wait_for_step(stopped + 12)
        run.kill_rank(3)
        assert {agent.wait(WAIT_S) for agent in agents} == {0}, run.said("second-0.txt")
    assert re.search(VERDICT, "".join(run.said(file.name) for file in run.folder.glob("second-*.txt")))
    run.require_one_end(expected, stopped)


def test_one_node_ends_with_the_same_weights(run: EngineRun, expected: str, launcher: str) -> None:
    with started(run, launcher, "one", nodes=1) as (agent,):
        assert agent.wait(WAIT_S) == 0, run.said("one-0.txt")
    run.require_one_end(expected)
