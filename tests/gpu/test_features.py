"""On 2 and 4 ranks: each axis, ZeRO 1 to 3, experts, rings and trees, single precision, compiled stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime import mesh_matrix
from tests.runtime.matrix import STEPS

from .machine import Machine
from .runs import EXPERTS, FEATURES, FLOAT64
from .training import require_equal, train, train_by_names

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

WORLDS = [pytest.param(world_size, marks=pytest.mark.ranks(world_size)) for world_size in (2, 4)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_a_plan_can_have_equals_one_process(tmp_path: Path, machine: Machine, world_size: int) -> None:
    runs = [run for run in FEATURES if run.world_size == world_size]
    require_equal(runs, train(machine, tmp_path, runs, STEPS))


@pytest.mark.parametrize("world_size", WORLDS)
def test_experts_equal_one_process(tmp_path: Path, machine: Machine, world_size: int) -> None:
    cases = [case for case in EXPERTS if case.ranks == world_size]
    ranks = train_by_names(machine, tmp_path, world_size, list(map(str, cases)), STEPS)
    for case in cases:
        found = [mesh_matrix.Trained(**rank[str(case)]) for rank in ranks]
        apart = mesh_matrix.Differences.of(found, mesh_matrix.train_alone(*case.alone, STEPS, torch.float64))
        assert max(apart.losses, apart.norms, apart.gradients, apart.weights) <= FLOAT64, (str(case), apart)
