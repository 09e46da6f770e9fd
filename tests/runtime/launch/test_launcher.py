"""The launcher with ranks that do not need torch: exit codes, signals, restarts, and that nothing is left running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintsched.runtime.launch import local_run
from quintsched.runtime.launch.job_plan import Worlds

from ...helpers.commands import until

pytestmark = pytest.mark.processes

RANK = """
import json, os, signal, sys, time
from pathlib import Path
from quintsched.runtime.launch.stop_signals import StopRequest, let_through

folder, what, *more = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def here():
    names = [name for name in os.environ if name.isupper() and ("RANK" in name or "WORLD" in name or "MASTER" in name)]
    assert open("/proc/self/comm").read() == f"rank {rank}\\n"
    said = {"pid": os.getpid(), "env": {name: os.environ[name] for name in names}}
    Path(folder, f"new-{rank}").write_text(json.dumps(said))
    Path(folder, f"new-{rank}").rename(Path(folder, f"rank-{rank}-{attempt}"))

if what == "env":
    here()
elif what == "exit" and rank == int(more[0]):
    sys.exit(int(more[1]))
elif what == "kill" and rank == int(more[0]):
    os.kill(os.getpid(), int(more[1]))
elif what == "fails" and attempt < int(more[0]):
    here()
    sys.exit(int(more[1]))
elif what == "stops":
    stop = StopRequest()
    with stop.listening():
        here()
        while not stop.asked:
            time.sleep(0.01)
elif what == "early":
    here()
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.01)
    stop = StopRequest()
    with stop.listening():
        sys.exit(0 if stop.asked else 9)
elif what != "fails":
    let_through()
    here()
    time.sleep(60)
"""

LAUNCHER = """
import sys
from quintsched.runtime.launch import local_run
from quintsched.runtime.launch.job_plan import Worlds

local_run._serve = lambda listener: listener  # these ranks have no use for a store
ranks, *rest = [{}]
sys.exit(local_run.start_ranks(Worlds(ranks), *rest))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()]))
    return "a_rank"


def pids(folder: Path, count: int, attempt: int = 0) -> list[int]:
    """Return the process ids of all ranks, once they have said them."""
    files = [folder / f"rank-{rank}-{attempt}" for rank in range(count)]
    until(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text())["pid"] for file in files]


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def launcher(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start `start_ranks` in a process of its own, which ends with the test."""
    command = [sys.executable, "-c", LAUNCHER.format(", ".join(map(repr, arguments)))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_cannot_be_is_said_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("parallel: {mesh: dp=2}")
    for arguments, words in (
        (["--resume"], "job.yaml: --resume needs checkpoint.dir"),
        (["--override", "train.seed"], "--override train.seed: it lets --resume continue a run with another value"),
        (["--set", "log.path=job.yaml/log.jsonl"], "job.yaml: cannot write the log: File exists"),
        (["--set", "checkpoint.dir=job.yaml"], "job.yaml: cannot write a checkpoint: File exists"),
    ):
        assert local_run.main(["--config", "job.yaml", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_an_exit_that_code_of_the_user_asks_for_is_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("leaves.py").write_text("def build(data):\n    raise SystemExit(0)\n")
    Path("job.yaml").write_text("{model: {name: 'leaves.py:build'}, parallel: {mesh: pp=1}}")
    assert local_run.main(["--config", "job.yaml"]) == 1
    assert "error: SystemExit: 0\nTraceback" in capsys.readouterr().err


def test_ranks_find_what_torchrun_would_tell_them(module: str, tmp_path: Path) -> None:
    assert local_run.start_ranks(Worlds([3]), module, [str(tmp_path), "env"]) == 0
    for rank in range(3):
        env = json.loads((tmp_path / f"rank-{rank}-0").read_text())["env"]
        assert int(env.pop("MASTER_PORT")) > 0
        assert env.pop("MASTER_ADDR") == "127.0.0.1"
        sizes = {"GROUP_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_WORLD_SIZE": 1}
        assert {name: int(value) for name, value in env.items()} == sizes | dict.fromkeys(("RANK", "LOCAL_RANK"), rank)


FAULTS = [(("exit", "2", "5"), 5, ""), (("kill", "1", "9"), 4, "error: rank 1 was ended by SIGKILL\n")]


@pytest.mark.parametrize(("fault", "code", "said"), FAULTS)
def test_the_first_failure_ends_all_and_its_code_is_that_of_the_run(module, tmp_path, fault, code, said, capfd):
    began = time.monotonic()
    assert local_run.start_ranks(Worlds([3]), module, [str(tmp_path), *fault]) == code
    assert time.monotonic() - began < 10
    assert capfd.readouterr().err == said
    left = [json.loads(file.read_text())["pid"] for file in tmp_path.glob("rank-*")]
    assert not any(map(runs, left))


def test_ranks_end_with_their_launcher_also_those_that_are_stopped(module: str, tmp_path: Path) -> None:
    with launcher([3], module, [str(tmp_path), "sleep"]) as process:
        ranks = pids(tmp_path, 3)
        os.kill(ranks[1], signal.SIGSTOP)
        process.kill()
        until(lambda: not any(map(runs, ranks)), 5)
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_is_asked_of_all_ranks_and_they_end_by_themselves(module: str, tmp_path: Path, number: int) -> None:
    with launcher([3], module, [str(tmp_path), "stops"]) as process:
        pids(tmp_path, 3)
        process.send_signal(number)
        assert process.wait(20) == 0


def test_ctrl_c_twice_ends_at_once_and_nothing_is_left(module: str, tmp_path: Path) -> None:
    with launcher([2], module, [str(tmp_path), "stops"]) as process:
        ranks = pids(tmp_path, 2)
        os.kill(ranks[0], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "stopping after the step in progress (Ctrl-C ends the run at once)\n"
        assert all(map(runs, ranks))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert not any(map(runs, ranks))


@pytest.mark.parametrize(("fails", "with_code", "restarts", "code"), [(2, 4, 2, 0), (2, 1, 1, 1), (1, 3, 5, 3)])
def test_a_run_that_failed_is_started_again(module, tmp_path, fails, with_code, restarts, code, capfd):
    found = local_run.start_ranks(Worlds([2]), module, [str(tmp_path), "fails", str(fails), str(with_code)], restarts)
    assert found == code
    times = min(fails, restarts) if with_code not in (2, 3) else 0
    again = f"the run ended with exit code {with_code}; starting it again: restart"
    said = [f"{again} {k + 1} of {restarts}" for k in range(times)]
    assert capfd.readouterr().err.splitlines() == said
