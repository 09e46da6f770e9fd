"""On 2 and 4 ranks: each axis, ZeRO 1 to 3, experts, rings and trees, single precision, compiled stages."""

from pathlib import Path

import pytest

from .machine import Machine
from .runs import FEATURES
from .training import require_equal, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)])
def test_what_a_plan_can_have_equals_one_process(tmp_path: Path, machine: Machine, world_size: int) -> None:
    runs = [run for run in FEATURES if run.world_size == world_size]
    require_equal(runs, train(machine, tmp_path, runs))
