"""Over gloo: cases of the grid equal one process. One launch trains all cases of a world size."""

from pathlib import Path

import pytest

from .grid import Case
from .grid_cases import CASES, NAMED, PIPELINES
from .grid_processes import Run, require_equality, train

pytestmark = pytest.mark.processes


def cases_of(world_size: int, every: int = 4) -> list[Case]:
    cases = [case for case in (*CASES[::every], *PIPELINES, *NAMED) if case.world_size == world_size]
    return [case for case in cases if case.wire == "nccl" and case.steps < 20]


def test_some_cases_equal_one_process(tmp_path: Path) -> None:
    """The first cheap ones that have replicas, cut layers, cut sequences, and a pipeline."""
    cheap = [case for case in cases_of(2, every=1) if case.model in ("own", "gpt") and case.layers == 2]
    by_tags: list[Run] = [
        ("rendezvous", next(case for case in cheap if case.size(axis) > 1)) for axis in ("dp", "tp", "cp")
    ]
    by_order: Run = ("nccl", next(case for case in cheap if case.size("pp") == 2))
    require_equality(train(tmp_path, 2, [*by_tags, by_order], timeout_s=100))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_every_fourth_case_equals_one_process(tmp_path: Path, world_size: int) -> None:
    by_tags: list[Run] = [("rendezvous", case) for case in cases_of(world_size)]
    by_order: list[Run] = [("nccl", case) for case in cases_of(world_size)[::3]]
    require_equality(train(tmp_path, world_size, [*by_tags, *by_order], timeout_s=800))
