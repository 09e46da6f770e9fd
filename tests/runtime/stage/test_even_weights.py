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
from quintsched.runtime.blocks.block_outlines import build_model
from quintsched.runtime.comm import Transport, run_local

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


def engine_of(transport: Transport, loss: Callable[..., Any], plan: Any, *, reduction: Any = torch.mean) -> Engine:
    blocks = [partial(Penalised, 4, 8, reduction), partial(nn.Linear, 8, CLASSES)]
    return Engine(plan, blocks, loss, sgd, transport=transport, dtype=torch.float64)


def whole_loss(loss: Callable[..., Any], labels: Tensor, reduction: Any, inputs: Tensor = INPUTS) -> float:
    first, last = build_model([partial(Penalised, 4, 8, reduction), partial(nn.Linear, 8, CLASSES)], 0, torch.float64)
    hidden, own = first(inputs)
    found = loss(last(hidden), labels)
    whole: Tensor = (found[0] + own) / found[1] if isinstance(found, tuple) else found + own
    return whole.item()


def summed(output: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize(
    ("loss", "labels", "reduction"),
    [(F.cross_entropy, LABELS, torch.mean), (F.cross_entropy, EVEN, torch.mean), (summed, UNEVEN, torch.sum)],
)
def test_losses_of_blocks_are_of_the_kind_of_the_loss(mesh: str, loss: Any, labels: Tensor, reduction: Any) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def run(transport: Transport) -> float:
        engine = engine_of(transport, loss, plan, reduction=reduction)
        mine = slice(engine.replica * 8 // engine.num_replicas, (engine.replica + 1) * 8 // engine.num_replicas)
        return engine.step(INPUTS[mine], labels[mine]).loss.item()

    for found in run_local(plan.mesh.size, run):
        assert found == pytest.approx(whole_loss(loss, labels, reduction), rel=1e-12)


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
@pytest.mark.parametrize(("loss", "reduction"), [(F.cross_entropy, torch.mean), (summed, torch.sum)])
def test_microbatches_of_unlike_size_weigh_both_alike(mesh: str, loss: Any, reduction: Any) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def run(transport: Transport) -> float:
        return engine_of(transport, loss, plan, reduction=reduction).step(INPUTS[:7], LABELS[:7]).loss.item()

    right = whole_loss(loss, LABELS[:7], reduction, INPUTS[:7])
    for found in run_local(plan.mesh.size, run):
        assert found == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_mean_over_uneven_targets_is_refused_beside_them(mesh: str, is_first: bool) -> None:
    plan, refused = qs.compile("1f1b", mesh=mesh, microbatches=2), list[int]()

    def run(transport: Transport) -> None:
        engine = engine_of(transport, F.cross_entropy, plan)
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
