"""Cases of the grid over gloo: processes train one after the other, and each has to equal one process.

Each case has a transport, and so groups, of its own, which end with it; the world is one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from quintsched.runtime.comm import Rules, connect

from ..helpers.training import Outcome, require_same_bits
from .grid import Case, Trained, require_equal, train_rank
from .grid_cases import CASES, NAMED, PIPELINES
from .ranks import run_ranks

Run = tuple[Rules, Case]


def train_on_rank(folder: Path, runs: list[str]) -> None:
    """Train, as one rank of the world, and leave what it ends with in FOLDER."""
    cases, found = {str(case): case for case in (*CASES, *PIPELINES, *NAMED)}, {}
    dist.init_process_group("gloo")
    for run in runs:
        rules, _, name = run.partition("/")
        transport = connect("gloo", timeout_s=60, rules=cast(Rules, rules))
        try:
            found[run] = vars(train_rank(cases[name], transport))
        except Exception as error:
            error.add_note(f"in {run}")
            raise
        transport.close()
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def train(folder: Path, world_size: int, runs: Sequence[Run], timeout_s: float) -> Mapping[Run, list[Trained]]:
    """Train in real processes; returns what each rank ends with."""
    names = {f"{rules}/{case}": (rules, case) for rules, case in runs}
    assert run_ranks(train_on_rank, world_size, folder, list(names), timeout_s=timeout_s) == [0] * world_size
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return {key: [Trained(**rank[name]) for rank in ranks] for name, key in names.items()}


def adds_alike_everywhere(case: Case) -> bool:
    """Whether sums over other ranks are of two terms at most, so that gloo's order of additions does not matter."""
    return case.world_size <= 2 * case.plan.mesh.pp


def require_equality(found: Mapping[Run, list[Trained]]) -> None:
    """Each run has to give the numbers of one process, and the bits of it or of those that add in the same order."""
    like: dict[object, list[Outcome]] = {}
    for (_, case), outcomes in found.items():
        require_equal(case, outcomes)
        if case.adds_as_alone:
            require_same_bits(outcomes, case.alone())
        elif adds_alike_everywhere(case):
            require_same_bits(outcomes, like.setdefault(str(case), [*outcomes]))
