"""Trains runs in real processes, all of one number of ranks in one launch, and compares them with one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.runtime.toys import Outcome, worst_difference

from .machine import Machine
from .runs import Run

START_S, RUN_S, STEP_S = 90.0, 45.0, 2.0
"""Time limits of a launch, of each run of it (it connects anew), and of each of its steps, in seconds."""


def train(machine: Machine, folder: Path, runs: Sequence[Run], steps: int) -> dict[str, list[Outcome]]:
    """Train, and return what each rank ends with, by the names of runs."""
    ranks = train_by_names(machine, folder, runs[0].world_size, [run.name for run in runs], steps)
    return {run.name: [Outcome(**rank[run.name]) for rank in ranks] for run in runs}


def train_by_names(
    machine: Machine, folder: Path, world_size: int, names: Sequence[str], steps: int
) -> list[Mapping[str, Any]]:
    """Train, and return what each rank leaves."""
    worker = ("tests.gpu.worker", machine.backend, folder, str(steps))
    machine.run(world_size, *worker, *names, timeout_s=START_S + len(names) * (RUN_S + STEP_S * steps))
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def require_equal(runs: Sequence[Run], found: Mapping[str, list[Outcome]]) -> None:
    """Every run has to give the numbers of one process; all that do not are named at once."""
    apart = {run.name: worst_difference(found[run.name], run.alone()) for run in runs}
    wrong = {run.name: apart[run.name] for run in runs if not apart[run.name] <= run.tolerance}
    assert not wrong, wrong


def require_agreement(found: Mapping[str, list[Outcome]], steps: int) -> None:
    """Each step has one loss, the same on every rank, and none is lost on the way."""
    for name, (first, *others) in found.items():
        assert len(first.losses) == steps, name
        assert torch.tensor(first.losses).isfinite().all(), name
        assert all(other.losses == first.losses for other in others), name
