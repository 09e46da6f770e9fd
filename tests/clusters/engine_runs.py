"""Runs of `examples/clusters/job.yaml` by an engine: their folder, log, weights, and the end of one of their ranks.

quintsched run ─▶ weights, by SHA-256 ◀── must be equal ──▶ an engine ─▶ killed in between ─▶ comes back ─▶ weights
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clusters"
JOB = EXAMPLES / "job.yaml"
EPOCHS = 4
"""Epochs of the runs: long enough that one can be killed in between."""

VERDICT = r"rank 3 \(host [^)]*\) (?:was killed|died|ended)"
"""Verdict on a killed rank, in whatever log an engine has; of Ray's workers nobody reports how they ended."""

WAIT_S = 240.0


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class EngineRun:
    """A run in a folder of its own, where its checkpoints, weights and log are."""

    folder: Path
    epochs: int = EPOCHS

    @property
    def settings(self) -> list[str]:
        """Settings of the job: absolute paths, since engines change the directory."""
        places = {"checkpoint.dir": "checkpoints", "checkpoint.export": "weights", "log.path": "log.jsonl"}
        return [f"train.epochs={self.epochs}", *(f"{key}={self.folder / name}" for key, name in places.items())]

    @property
    def options(self) -> list[str]:
        """The same as options of a command."""
        return [word for setting in self.settings for word in ("--set", setting)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the processes: the checkout, and the commands of this Python."""
        path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
        return os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}

    def steps_of(self, event: str) -> list[int]:
        """Return the steps of the log's records of an event: "start" of each attempt, "stop" of each that has saved."""
        return [record["step"] for record in self.records(event) if record.get("saved", True)]

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the log's records of an event."""
        log = self.folder / "log.jsonl"
        lines = log.read_text("utf-8").splitlines() if log.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["event"] == event]

    def require_fewer_replicas(self, other: EngineRun) -> None:
        """Require an end on half of the replicas, with the loss of another run, which adds in another order."""
        begun = self.records("start")
        assert [record["plan"].partition(",")[0] for record in begun] == ["1f1b on dp=2", "1f1b on dp=1"]
        assert begun[1]["step"] > 0
        found, expected = (run.records("epoch")[-1] for run in (self, other))
        assert found["step"] == expected["step"]
        assert abs(found["validation_loss"] - expected["validation_loss"]) < 1e-4

    def wait_for_step(self, step: int) -> None:
        """Wait until the log has a step."""
        wait_until(lambda: max(self.steps_of("step"), default=0) >= step, f"step {step}")

    def weights(self) -> str:
        """SHA-256 of the files of weights at the end of the run."""
        digest = hashlib.sha256()
        files = sorted((self.folder / "weights").iterdir())
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        assert len(files) > 1
        return digest.hexdigest()

    def require_one_end(self, expected: str, stopped: int | None = None) -> None:
        """Require these weights, of one attempt; of three, of which the second began where the first has stopped."""
        begun = self.steps_of("start")
        assert begun[:2] == [0, *([] if stopped is None else [stopped])]
        assert begun == sorted({*begun})
        assert len(begun) == (1 if stopped is None else 3)
        assert self.weights() == expected

    def rank_processes(self, rank: int) -> list[int]:
        """Processes of a rank of this run: torchrun's by environment and arguments, forked ones by name and folder."""
        found, folder = [], str(self.folder)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command, said = ((process / name).read_bytes() for name in ("cmdline", "environ"))
                is_torchruns = folder.encode() in command and f"RANK={rank}".encode() in said.split(b"\0")
                is_named = (process / "comm").read_text() == f"rank {rank}\n"
                if is_torchruns or (is_named and os.readlink(process / "cwd") == folder):
                    found.append(int(process.name))
        return found

    def kill_rank(self, rank: int) -> None:
        """Kill a rank as the system does that lacks memory."""
        pids = self.rank_processes(rank)
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    @contextmanager
    def started(self, *command: str | Path, log: str = "out.txt", **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command in the folder; its process group ends with the context, whatever happens."""
        with (self.folder / log).open("wb") as out:
            words, told = [str(word) for word in command], self.environment | more
            both = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(words, cwd=self.folder, env=told, **both)
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def said(self, log: str = "out.txt") -> str:
        """Return what a command has printed so far."""
        return (self.folder / log).read_text("utf-8", errors="replace")


def plain_run(run: EngineRun) -> EngineRun:
    """Run the job by `quintsched run`."""
    with run.started(sys.executable, "-m", "quintsched", "run", JOB, *run.options) as process:
        assert process.wait(WAIT_S) == 0, run.said()
    return run
