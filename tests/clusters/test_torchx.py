"""TorchX on two nodes, which are two replicas of its local scheduler: a stop, a killed rank; and on one node."""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from .engine_runs import EXAMPLES, JOB, VERDICT, WAIT_S, EngineRun

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(900)]


def command(run: EngineRun, ranks: str = "2x2") -> list[str | Path]:
    """Return a command that runs the job on "nodes x ranks of each"."""
    pytest.importorskip("torchx", reason="needs pip install torchx")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchx = Path(sys.executable).with_name("torchx")
    how = ["--scheduler", "local_cwd", "--scheduler_args", f"log_dir={run.folder / 'logs'}", "--wait"]
    component = [f"{EXAMPLES / 'torchx_component.py'}:train", "--job", JOB, "--j", ranks, "--port", str(port)]
    return [torchx, "run", *how, *component, "--", *run.settings]


def test_a_stop_and_a_killed_rank_change_no_weight(run: EngineRun, expected: str) -> None:
    with run.started(*command(run), log="first.txt") as torchx:
        run.wait_for_step(12)
        for rank in range(4):
            for process in run.rank_processes(rank):
                os.kill(process, signal.SIGTERM)
        torchx.wait(WAIT_S)
    (stopped,) = run.steps_of("stop")
    with run.started(*command(run), log="second.txt") as torchx:
        run.wait_for_step(stopped + 12)
        run.kill_rank(3)
        assert torchx.wait(WAIT_S) == 0, run.said("second.txt")
    assert re.search(VERDICT, run.said("second.txt"))
    run.require_one_end(expected, stopped)


def test_one_node_ends_with_the_same_weights(run: EngineRun, expected: str) -> None:
    with run.started(*command(run, "1x4")) as torchx:
        assert torchx.wait(WAIT_S) == 0, run.said()
    run.require_one_end(expected)
