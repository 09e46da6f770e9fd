"""Over NCCL: the configurations of the equality matrix give the numbers of one process, and go on for 500 steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.matrix import CASES, OVERLAPPING, STEPS, Case
from tests.runtime.toys import Outcome, worst_difference

from .sharing import torchrun, wants_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

WORLDS = [pytest.param(world_size, marks=wants_ranks(world_size)) for world_size in (2, 4, 8)]
MANY_STEPS = 500
LASTING = {2: ("dualpipe", "pp=2"), 4: ("zbv", "pp=4"), 8: ("1f1b", "dp=2,pp=2,tp=2")}
"""The schedule and mesh that every run of the tests takes through many steps; the long one takes all."""


def cases_of(world_size: int) -> list[Case]:
    return [case for case in CASES if case.world_size == world_size]


def one_per_schedule(cases: Sequence[Case]) -> list[Case]:
    return list({case.schedule: case for case in reversed(cases)}.values())


def train(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cases: Sequence[Case], steps: int, backend: str = "nccl"
) -> dict[Case, list[Outcome]]:
    """Train in real processes; returns what each rank ends with."""
    world_size = cases[0].world_size
    names = [str(case) for case in cases]
    worker = ("tests.gpu.matrix_worker", backend, folder, str(steps))
    torchrun(monkeypatch, world_size, *worker, *names, timeout_s=60 + len(cases) * (20 + steps))
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
    return {case: [Outcome(**rank[str(case)]) for rank in ranks] for case in cases}


def require_equal(found: dict[Case, list[Outcome]]) -> None:
    for case, outcomes in found.items():
        assert worst_difference(outcomes, case.alone(torch.float64)) <= 1e-12, str(case)


def require_agreement(found: dict[Case, list[Outcome]]) -> None:
    """Each step has one loss, the same on every rank, and none is lost on the way."""
    for case, (first, *others) in found.items():
        assert len(first.losses) == MANY_STEPS
        assert torch.tensor(first.losses).isfinite().all(), str(case)
        assert all(other.losses == first.losses for other in others), str(case)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_schedule_equals_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    require_equal(train(monkeypatch, tmp_path, one_per_schedule(cases_of(world_size)), STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_configuration_equals_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    require_equal(train(monkeypatch, tmp_path, cases_of(world_size), STEPS))


@pytest.mark.parametrize("world_size", WORLDS)
def test_five_hundred_steps_without_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    lasting = next(case for case in cases_of(world_size) if (case.schedule, case.mesh) == LASTING[world_size])
    require_agreement(train(monkeypatch, tmp_path, [lasting], MANY_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_five_hundred_steps_of_every_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    require_agreement(train(monkeypatch, tmp_path, one_per_schedule(cases_of(world_size)), MANY_STEPS))


@pytest.mark.parametrize("world_size", WORLDS)
def test_overlap_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    overlapped = OVERLAPPING[world_size]
    plain = replace(overlapped, overlap=False)
    found = train(monkeypatch, tmp_path, [plain, overlapped], 5)
    for one, other in zip(found[plain], found[overlapped], strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
