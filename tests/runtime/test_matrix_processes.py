"""Over gloo: the configurations of the matrix equal one process. One launch trains all cases of a world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from quintsched.runtime.comm import Rules

from . import matrix_worker
from .matrix import CASES, Case
from .ranks import run_ranks
from .toys import Outcome, worst_difference

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
Run = tuple[Rules, Case]


def cases_of(world_size: int) -> list[Case]:
    return [case for case in CASES if case.world_size == world_size]


def train(folder: Path, world_size: int, runs: Sequence[Run], timeout_s: float) -> Mapping[Run, list[Outcome]]:
    """Train in real processes; returns what each rank ends with."""
    names = {f"{rules}/{case}": (rules, case) for rules, case in runs}
    assert run_ranks(matrix_worker.main, world_size, folder, list(names), timeout_s=timeout_s) == [0] * world_size
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
    return {key: [Outcome(**rank[name]) for rank in ranks] for name, key in names.items()}


def adds_alike_everywhere(case: Case) -> bool:
    """Whether sums over other ranks are of two terms at most, so that gloo's order of additions does not matter."""
    return case.world_size <= 2 * case.plan.mesh.pp


def require_equal(found: Mapping[Run, list[Outcome]]) -> None:
    """Each run has to give the numbers of one process, and the bits of those before it that add in the same order."""
    like: dict[object, Mapping[str, torch.Tensor]] = {}
    for (rules, case), outcomes in found.items():
        where, alone = f"{rules}/{case}", case.alone(torch.float64)
        assert worst_difference(outcomes, alone) <= 1e-12, where
        if adds_alike_everywhere(case):
            own = {name: weight for outcome in outcomes for name, weight in outcome.weights.items()}
            expected = alone.weights if case.adds_as_alone else like.setdefault(case.sums, own)
            for outcome in outcomes:
                for name, weight in outcome.weights.items():
                    assert torch.equal(weight, expected[name]), f"{where}: {name}"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_some_configurations_equal_one_process(tmp_path: Path, world_size: int) -> None:
    cases = [case for case in cases_of(world_size) if case.often]
    assert len(cases) == 4
    by_tags: list[Run] = [("rendezvous", case) for case in cases]
    require_equal(train(tmp_path, world_size, [*by_tags, ("nccl", cases[0]), ("nccl", cases[-1])], timeout_s=100))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", sorted({case.world_size for case in CASES}))
def test_every_configuration_equals_one_process(tmp_path: Path, world_size: int) -> None:
    cases = cases_of(world_size)
    by_tags: list[Run] = [("rendezvous", case) for case in cases]
    by_order: list[Run] = [("nccl", case) for case in cases[::3]]
    require_equal(train(tmp_path, world_size, [*by_tags, *by_order], timeout_s=800))
