"""Trains runs in real processes, all of one number of ranks in one launch, and compares them with one process."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.runtime.grid import STEPS, Trained, differences

from .machine import Machine
from .runs import Run

START_S, RUN_S, STEP_S = 90.0, 45.0, 2.0
"""Time limits of a launch, of each run of it (it connects anew), and of each of its steps, in seconds."""


def train(machine: Machine, folder: Path, runs: Sequence[Run], steps: int = STEPS) -> dict[str, list[Trained]]:
    """Train, and return what each rank ends with, by the names of runs."""
    names, world_size = [run.name for run in runs], runs[0].world_size
    worker = ("tests.gpu.worker", machine.backend, folder, str(steps))
    machine.run(world_size, *worker, *names, timeout_s=START_S + len(names) * (RUN_S + STEP_S * steps))
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
    return {name: [Trained(**rank[name]) for rank in ranks] for name in names}


def require_equal(runs: Sequence[Run], found: Mapping[str, list[Trained]]) -> None:
    """Every run has to give the numbers of one process; all that do not are named at once."""
    apart = {run.name: max(differences(found[run.name], run.case.alone()).values()) for run in runs}
    wrong = {run.name: apart[run.name] for run in runs if not apart[run.name] <= run.tolerance}
    assert not wrong, wrong


def require_agreement(found: Mapping[str, list[Trained]], steps: int) -> None:
    """Each step has one loss, the same on every rank, and none is lost on the way."""
    for name, (first, *others) in found.items():
        assert len(first.losses) == steps + 1, name
        assert torch.tensor(first.losses).isfinite().all(), name
        assert all(other.losses == first.losses for other in others), name
