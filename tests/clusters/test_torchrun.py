"""torchrun on two nodes, which are two agents of it: a stop, a killed rank; and on one node."""

import os
import re
import signal
import socket
import subprocess
from contextlib import ExitStack

import pytest

from .engine_runs import EXAMPLES, JOB, VERDICT, WAIT_S, EngineRun

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]


def start(stack: ExitStack, run: EngineRun, name: str, nodes: int = 2) -> list[subprocess.Popen[bytes]]:
    """Start the agents of nodes that share four ranks; their logs are NAME-0.txt, NAME-1.txt, …"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = {"MASTER": f"127.0.0.1:{port}", "NODES": str(nodes), "RANKS": str(4 // nodes), "ADDRESS": "127.0.0.1"}
    command = (EXAMPLES / "torchrun.sh", JOB, *run.options)
    return [stack.enter_context(run.started(*command, log=f"{name}-{node}.txt", **told)) for node in range(nodes)]


def test_a_stop_and_a_killed_rank_change_no_weight(run: EngineRun, expected: str) -> None:
    with ExitStack() as stack:
        agents = start(stack, run, "first")
        run.wait_for_step(12)
        for agent in agents:
            os.kill(agent.pid, signal.SIGTERM)
        for agent in agents:
            agent.wait(WAIT_S)
    (stopped,) = run.steps_of("stop")
    with ExitStack() as stack:
        agents = start(stack, run, "second")
        run.wait_for_step(stopped + 12)
        run.kill_rank(3)
        assert [agent.wait(WAIT_S) for agent in agents] == [0, 0], run.said("second-0.txt")
    assert re.search(VERDICT, run.said("second-0.txt") + run.said("second-1.txt"))
    run.require_one_end(expected, stopped)


def test_one_node_ends_with_the_same_weights(run: EngineRun, expected: str) -> None:
    with ExitStack() as stack:
        (agent,) = start(stack, run, "one", nodes=1)
        assert agent.wait(WAIT_S) == 0, run.said("one-0.txt")
    run.require_one_end(expected)
