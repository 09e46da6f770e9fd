"""A loop of one's own, started as torchrun does: every rank that is left says the verdict, and ends with 4."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.stalls.stall_report import StallReport

from ..ranks import run_ranks


class Killed(nn.Module):
    """Kills its process, once it is due."""

    is_due = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is given, if ever."""
        if Killed.is_due:
            Path("began").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def loop(folder: Path, culprit: int) -> None:
    """Make steps until the fault comes; what this rank says of it goes into a file, as does a SIGTERM of torchrun's."""
    os.chdir(folder)
    rank = int(os.environ["RANK"])
    sys.stderr = (folder / f"{rank}.txt").open("w")
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=2)
    blocks = [lambda: nn.Sequential(nn.Linear(8, 8), Killed())] * 3
    engine = Engine(plan, blocks, nn.MSELoss(), lambda given: torch.optim.SGD(given, lr=0.1), stall_after=3)
    data = torch.randn(4, 8)
    for step in range(1, 100):
        Killed.is_due = step == 5 and rank == culprit
        if step == 5:  # which torchrun answers with this
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        try:
            engine.step(data, data)
        except qs.StallError as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(error.exit_code)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_all_that_are_left_say_the_same_and_end_with_4(tmp_path: Path) -> None:
    culprit = 0
    codes = run_ranks(loop, 3, tmp_path, culprit)
    ended = time.time() - float((tmp_path / "began").read_text())
    assert codes == [-signal.SIGKILL, 4, 4]
    report = StallReport.load(tmp_path / "stall.json")
    assert report.ranks == (culprit,)
    assert (report.culprits[0].step, report.culprits[0].phase) == (5, "step")
    first_line = report.words().splitlines()[0]
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3) if rank != culprit]
    assert all(first_line in text for text in said), said
    assert ended < 60
