"""Blocks that look at data, which the meta device has none of: shapes are found by a unit that runs for real."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.training import require_equal
from ..toys import CLASSES, sgd
from .changing import Shape, batches, train_alone, train_on


class Chosen(nn.Module):
    """Experts over the tokens that are theirs, as transformers' default mixtures loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen, mixed = rows.detach().sum(-1).mul(10).long() % 3, torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            places = (chosen == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, places, self.experts[number](rows[places]))
        return x + mixed.view_as(x)


class Measured(nn.Module):
    """Scales by what a number of the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if x.detach().abs().max().item() < 1e6 else 1.0
        return self.inner(x) * scale


BLOCKS = [partial(nn.Embedding, CLASSES, 8), Chosen, Chosen, Measured]
SHAPES = [
    Shape([(4, 8), (4, 8)]),
    Shape([(5, 16), (3, 4)]),
    Shape([(2, 8), (0, 4)], evaluates=True),
    Shape([(2, 8), (6, 8)]),
]


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2,pp=2", 0), ("dp=2,pp=4", 2), ("dp=2", 0)])
def test_shapes_that_only_data_can_tell(mesh: str, zero: int) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4, zero=zero)
    require_equal(train_on(plan, BLOCKS, SHAPES), train_alone(BLOCKS, SHAPES))


def test_a_trial_leaves_generators_and_buffers_alone() -> None:
    plan, ((inputs, targets),) = qs.compile("1f1b", mesh="pp=2", microbatches=2), batches(Shape([(4, 8)]), 0)

    class Noisy(Chosen):
        def __init__(self) -> None:
            super().__init__()
            self.counted = nn.BatchNorm1d(8, momentum=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.counted(x.flatten(0, 1)).view_as(x) + 0 * torch.rand(1, dtype=x.dtype))

    def run(transport: Transport) -> None:
        blocks = [partial(nn.Embedding, CLASSES, 8), Noisy, Chosen, Measured]
        engine = Engine(plan, blocks, cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        engine._runner.prepare(plan, engine._model.batches(plan, inputs, targets, {}))
        for stage in engine.stages.values():
            assert not any(buffer.any() for name, buffer in stage.named_buffers() if name.endswith("running_mean"))

    before = torch.get_rng_state()
    run_local(2, run)
    assert torch.equal(torch.get_rng_state(), before)


class Varying(nn.Module):
    """Leaves only what is positive: a shape that its data decide."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum((1, 2)) > 0]


def test_a_shape_that_varies_with_data_is_refused_by_name() -> None:
    plan, ((inputs, targets),) = qs.compile("1f1b", mesh="pp=2", microbatches=2), batches(Shape([(8, 8)]), 0)
    blocks = [partial(nn.Embedding, CLASSES, 8), Varying, Measured, nn.Identity]

    def run(transport: Transport) -> None:
        engine = Engine(plan, blocks, lambda x, _: x.sum(), sgd, dtype=torch.float64, transport=transport)
        for _ in range(3):
            engine.step(inputs, targets)

    with pytest.raises(qs.MisfitError, match=r"stage 0 .*Varying.* gave .*; the ranks agreed on .* must not depend"):
        run_local(2, run)
