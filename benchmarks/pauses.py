"""Pauses below the stall limit: ranks of real runs are suspended at random, and no run may be ended for it.

python benchmarks/pauses.py                      2,000 pauses in four runs at once, about 6 minutes
python benchmarks/pauses.py --pauses 200 --limit 2

A pause is of one rank, or of several one after the other, for 5 ms to nine tenths of the limit, short ones more often.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.runtime.faults.launched import job_settings  # noqa: E402

MESHES = (("pp=3", "1f1b"), ("dp=2", "gpipe"), ("pp=2", "zb-h1"), ("pp=2", "1f1b"))
COMMAND = "from quintsched.cli import main; main()"
SHORTEST_S, GAP_S = 0.005, 0.02


@dataclass
class PausedRun:
    """One run and its outcome: `paused` are the lengths of its pauses, `code` is None while it runs."""

    mesh: str
    schedule: str
    limit_s: float
    folder: Path
    seed: int
    paused: list[float] = field(default_factory=list)
    aborted: bool = False
    code: int | None = None
    said: str = ""

    def run(self, pauses: int) -> None:
        """Start it, pause its ranks so many times, and ask it to stop."""
        settings = job_settings(self.folder, self.mesh, self.schedule)
        settings["train"] |= {"epochs": 10**6}
        settings["runtime"] |= {"stall_after": self.limit_s, "timeout_s": 60}
        job = self.folder / "job.yaml"
        job.write_text(yaml.safe_dump(settings))
        with (self.folder / "said").open("wb") as said:
            launcher = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "run", str(job)],
                cwd=self.folder,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
            try:
                self._pause(launcher, pauses)
                self.aborted = launcher.poll() is not None
                launcher.send_signal(signal.SIGTERM)
                self.code = launcher.wait(60)
            finally:
                launcher.kill()
        self.said = (self.folder / "said").read_text(errors="replace")
        self.aborted = self.aborted or (self.folder / "stall.json").exists()

    def _pause(self, launcher: subprocess.Popen[bytes], pauses: int) -> None:
        chance = random.Random(self.seed)
        ranks = self._ranks_once_they_train(launcher)
        while len(self.paused) < pauses and launcher.poll() is None:
            longest = 0.9 * self.limit_s
            length = min(max(chance.expovariate(10.0), SHORTEST_S), longest)
            if chance.random() < 0.03:
                length = longest
            pid = chance.choice(ranks)
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(length)
            finally:
                os.kill(pid, signal.SIGCONT)
            self.paused.append(length)
            time.sleep(chance.random() * GAP_S)

    def _ranks_once_they_train(self, launcher: subprocess.Popen[bytes]) -> list[int]:
        """Wait for the first metrics; return the process ids of the ranks."""
        until = time.monotonic() + 120
        while time.monotonic() < until and launcher.poll() is None:
            if "epoch 1/" in (self.folder / "said").read_text(errors="replace"):
                return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_rank(path)]
            time.sleep(0.1)
        raise SystemExit(f"the run did not train: {(self.folder / 'said').read_text(errors='replace')[-2000:]}")

    def _is_rank(self, process: Path) -> bool:
        """Whether a process is a rank of this run."""
        try:
            in_folder = os.readlink(process / "cwd") == str(self.folder)
            return in_folder and b"\0RANK=" in b"\0" + (process / "environ").read_bytes()
        except OSError:  # it has ended
            return False


def main() -> None:
    """Run them, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pauses", type=int, default=2000)
    parser.add_argument("--limit", type=float, default=4.0, help="how long a step may stand still, in seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number, (mesh, schedule) in enumerate(MESHES):
            (own := Path(folder) / str(number)).mkdir()
            runs.append(PausedRun(mesh, schedule, arguments.limit, own, number))
        threads = [threading.Thread(target=run.run, args=[arguments.pauses // len(runs)]) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for run in runs:
        total, longest = sum(run.paused), max(run.paused, default=0.0)
        ended = "ABORTED" if run.aborted or run.code != 0 else "went on, and stopped when asked"
        told = f"{len(run.paused)} pauses, {total:.0f} s in all, at most {longest:.2f} s: {ended}"
        sys.stdout.write(f"{run.mesh} {run.schedule}: {told}\n")
        if run.aborted or run.code != 0:
            sys.stdout.write(run.said[-2000:] + "\n")
    aborts = sum(run.aborted or run.code != 0 for run in runs)
    sys.stdout.write(f"{sum(len(run.paused) for run in runs)} pauses below {arguments.limit:g} s, {aborts} aborts\n")


if __name__ == "__main__":
    main()
