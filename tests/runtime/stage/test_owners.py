"""Modules that several ranks of one process are given: each trains modules of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local

from ..toys import share

WIDTH = 4


def steps(blocks: list[nn.Module], mesh: str, times: int = 2) -> list[list[float]]:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def train(transport: Transport) -> list[float]:
        engine = Engine(
            plan, blocks, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), dtype=torch.float64, transport=transport
        )
        x = torch.arange(8 * WIDTH, dtype=torch.float64).view(8, WIDTH) / 8
        return [float(engine.step(*share(engine, x, x.flip(0))).loss) for _ in range(times)]

    return run_local(plan.mesh.size, train, timeout_s=60)


def test_replicas_do_not_train_one_module() -> None:
    with pytest.raises(MisfitError, match=r"block 0 \(Linear\) is trained by another rank of this process; make the"):
        steps([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], "dp=2")


def test_stages_of_one_list_are_trained_and_trained_again_by_later_ranks() -> None:
    blocks = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
    losses = [loss for _ in range(3) for loss in steps(blocks, "pp=2")[0]]
    assert losses == sorted(losses, reverse=True)
