"""Cases of the matrix over gloo: processes train one after the other, and each has to equal one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from quintsched.runtime.comm import Rules

from . import matrix_worker
from .matrix import Case
from .ranks import run_ranks
from .toys import Outcome, worst_difference

Run = tuple[Rules, Case]


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
