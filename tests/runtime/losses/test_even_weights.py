"""Losses of blocks beside a mean: both weigh as samples do, or microbatches that do not are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local

from ...helpers.training import check_equality
from ..toys import sgd

CLASSES = 5
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.tensor([1, 4, 2, 3, 0, 4, 0, 2])
UNEVEN = torch.tensor([1, -100, -100, 3, 0, 4, 0, -100])
EVEN = torch.tensor([1, -100, 2, -100, -100, 4, 0, -100])


class Penalised(nn.Linear):
    """A layer with a loss of its own, over samples."""

    def __init__(self, inputs: int, outputs: int, reduction: Callable[[Tensor], Tensor] = torch.mean) -> None:
        super().__init__(inputs, outputs)
        self.reduction = reduction

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found, self.reduction(found.square().sum(1))


def blocks(reduction: Any = torch.mean) -> list[Any]:
    return [partial(Penalised, 4, 8, reduction), partial(nn.Linear, 8, CLASSES)]


def summed(output: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize(
    ("loss", "labels", "reduction"),
    [
        (F.cross_entropy, EVEN, torch.mean),
        (summed, UNEVEN, torch.sum),
        *((loss, LABELS[:7], reduction) for loss, reduction in ((F.cross_entropy, torch.mean), (summed, torch.sum))),
    ],
    ids=["even", "summed", "seven samples", "seven samples, summed"],
)
def test_losses_of_blocks_are_of_the_kind_of_the_loss(mesh: str, loss: Any, labels: Tensor, reduction: Any) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    check_equality(plan, blocks(reduction), loss, sgd, [(INPUTS[: len(labels)], labels)])


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_mean_over_uneven_targets_is_refused_beside_them(mesh: str, is_first: bool) -> None:
    plan, refused = qs.compile("1f1b", mesh=mesh, microbatches=2), list[int]()

    def run(transport: Transport) -> None:
        engine = Engine(plan, blocks(), F.cross_entropy, sgd, transport=transport, dtype=torch.float64)
        mine = slice(engine.replica, None, engine.num_replicas)
        if not is_first:
            engine.step(INPUTS[mine], LABELS[mine])
        try:
            engine.step(INPUTS[mine], UNEVEN[mine])
        except MisfitError:
            refused.append(transport.rank)
            raise

    with pytest.raises(MisfitError, match=r"blocks have losses of their own .* return \(sum, weight\)"):
        run_local(plan.mesh.size, run)
    assert len(refused) == plan.mesh.size or not is_first
