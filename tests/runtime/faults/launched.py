"""A run with a fault, as `quintsched run` starts it, in processes that are forked from one that has imported all.

    test ─▶ forkserver (torch, quintsched imported) ─▶ launcher ─┬─▶ rank 0      the launcher's own code, but for
                                                                 └─▶ rank 1 …    fork in the place of exec

What the launcher and its ranks write goes to `said`, who was named to `stall.json`, which processes there were to
`pids`; when it went wrong to `fired`.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quintsched as qs
from quintsched.stalls.stall_report import StallReport

from ..ranks import PRELOADED
from .injection import Injection, as_arguments

HERE = Path(__file__).parent
STALL_AFTER_S = 1.5
REFUSED = 3
"""The exit code of a run that ranks refuse themselves, without a report."""


@dataclass(frozen=True)
class Outcome:
    """End of a run with a fault: the launcher's exit code, its output, and the rank that was named.

    `told_s` is how long after the fault the report was there, `left` how many processes were left a second later.
    """

    code: int | None
    said: str
    report: StallReport | None
    told_s: float | None
    left: int


def job_settings(folder: Path, mesh: str, schedule: str = "1f1b", microbatches: int = 4, **more: Any) -> dict[str, Any]:
    """Return a job of a few quick steps whose files are in a folder."""
    return {
        "model": {"name": f"{HERE}/toy.py:build"},
        "data": {"name": f"{HERE}/toy.py:load"},
        "parallel": {"mesh": mesh, "schedule": schedule, "microbatches": microbatches, **more},
        "train": {"epochs": 2, "batch_size": 16},
        "runtime": {"transport": "gloo", "stall_after": STALL_AFTER_S, "timeout_s": 6.0},
        "checkpoint": {"dir": f"{folder}/checkpoints", "every": 3},
        "log": {"path": f"{folder}/log.jsonl", "every": 1},
    }


def plan_of_job(mesh: str, schedule: str = "1f1b", microbatches: int = 4, **more: Any) -> qs.Plan:
    """Return the plan that such a job runs."""
    return qs.compile(schedule, mesh=mesh, microbatches=microbatches, **more)


def run_with(
    injection: Injection | None, folder: Path, settings: dict[str, Any], limit_s: float = 60.0, *more: str
) -> Outcome:
    """Run a job with a fault, and return how it ended; nothing is left running. `more`: arguments of the launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps(settings))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = None if injection is None else as_arguments(injection)
    launcher = context.Process(target=launch, args=(str(folder), arguments, more))
    launcher.start()
    launcher.join(limit_s)
    code = launcher.exitcode
    time.sleep(0.3)
    left = left_of(folder)
    if launcher.is_alive():
        launcher.kill()
        launcher.join()
    end_all(folder)
    return outcome_of(folder, code, left)


def outcome_of(folder: Path, code: int | None, left: int) -> Outcome:
    """Return how a run ended whose files are in a folder."""
    path, fired, words = folder / "stall.json", folder / "fired", folder / "said"
    report = StallReport.load(path) if path.exists() else None
    told = path if path.exists() or code != REFUSED else words
    told_s = told.stat().st_mtime - float(fired.read_text()) if told.exists() and fired.exists() else None
    said = words.read_text(errors="replace") if words.exists() else ""
    return Outcome(code, said, report, told_s, left)


def _pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def left_of(folder: Path) -> int:
    """Return how many processes of a run are there."""
    return sum(Path(f"/proc/{pid}").exists() for pid in _pids(folder))


def end_all(folder: Path) -> None:
    """End what is left of a run."""
    for pid in _pids(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def launch(folder: str, injected: dict[str, Any] | None, machine: Sequence[str] = ()) -> None:
    """Be the launcher of a job in a folder; `machine` are arguments that say which of several it is."""
    from quintsched.runtime.launch import local_run

    said = os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    injection = None if injected is None else Injection(**injected)

    class Forking(local_run.ForkServer):
        """Forks ranks from this process, which has imported all."""

        def __init__(self, *_: object) -> None:
            signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the launcher
            self._channel, self._other = socket.socketpair()

        def __exit__(self, *_: object) -> None:
            """Nothing is left to end."""

        def start_rank(self, environment: Mapping[str, str], arguments: Sequence[str]) -> Any:
            return _Forked(Path(folder), environment, arguments, injection)

    local_run.ForkServer = Forking  # type: ignore[misc]
    code = local_run.main(["--config", f"{folder}/job.yaml", *machine])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Forked:
    """Stand-in for Popen, with the methods that the launcher uses."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], arguments: Sequence[str], injection: Injection | None
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _be_rank(folder, environment, arguments, injection)
        with (folder / "pids").open("a") as file:
            file.write(f"{self.pid}\n")

    def poll(self) -> int | None:
        """Return how it ended, or None."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int | None:
        """Wait for its end."""
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_rank(
    folder: Path, environment: Mapping[str, str], arguments: Sequence[str], injection: Injection | None
) -> None:
    code = 70
    try:
        import torch

        from quintsched.runtime.launch import worker

        os.setpgid(0, 0)
        os.environ.update(environment, OMP_NUM_THREADS="1")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)
        if injection is not None:
            injection.install(folder)
        code = worker.main(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
