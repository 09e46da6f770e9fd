"""Over gloo: the configurations of the matrix equal one process. One launch trains all cases of a world size."""

from __future__ import annotations

from pathlib import Path

import pytest

from .matrix import CASES
from .matrix_processes import Run, require_equal, train

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_some_configurations_equal_one_process(tmp_path: Path, world_size: int) -> None:
    cases = [case for case in [case for case in CASES if case.world_size == world_size] if case.often]
    assert len(cases) == 4
    by_tags: list[Run] = [("rendezvous", case) for case in cases]
    require_equal(train(tmp_path, world_size, [*by_tags, ("nccl", cases[0]), ("nccl", cases[-1])], timeout_s=100))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", sorted({case.world_size for case in CASES}))
def test_every_configuration_equals_one_process(tmp_path: Path, world_size: int) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    by_tags: list[Run] = [("rendezvous", case) for case in cases]
    by_order: list[Run] = [("nccl", case) for case in cases[::3]]
    require_equal(train(tmp_path, world_size, [*by_tags, *by_order], timeout_s=800))
