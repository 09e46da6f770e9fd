"""Losses that blocks return in evaluations are of the same kind as in training."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime import run_local

from ..trials import engine_of
from .loss_blocks import MEAN, SUMS, VARIANCE, WIDTH, Block, pair


class OtherInEvaluations(Block):
    def __init__(self, loss, other, *, by_mode=True):
        super().__init__(loss)
        self.other, self.by_mode = other, by_mode

    def forward(self, x):
        y = self.inner(x)
        trains = self.training if self.by_mode else torch.is_grad_enabled()
        return y, (self.loss if trains else self.other)(self, y)


SUM = SUMS["of squares"]
EVALUATIONS = {
    "a sum": (MEAN, SUM, True, F.mse_loss, "it is a sum, and"),
    "a mean": (SUM, MEAN, True, pair, "it is a mean over samples, and"),
    "a variance": (MEAN, VARIANCE, True, F.mse_loss, "it is neither"),
    "the last": (MEAN, lambda _, y: y[-1].mean(), True, F.mse_loss, "it is neither"),
    "without a graph": (MEAN, SUM, False, F.mse_loss, "it is a sum, and"),
    "nothing": (SUM, lambda _, y: y.new_zeros(()), True, pair, ""),
    "twice": (MEAN, lambda b, y: 2 * MEAN(b, y).detach(), True, F.mse_loss, ""),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_losses_are_of_one_kind_in_evaluations_too(mesh, trains, name):
    loss, other, by_mode, loss_fn, said = EVALUATIONS[name]
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    refusal = "in evaluations, block 1 .*" + said

    def work(transport):
        blocks = [lambda: nn.Linear(WIDTH, WIDTH), lambda: OtherInEvaluations(loss, other, by_mode=by_mode)]
        engine = engine_of(transport, blocks, loss_fn, mesh, dtype=torch.float64)
        mine = x.chunk(engine.num_replicas)[engine.replica]
        with torch.inference_mode(mesh == "dp=2"):
            engine.evaluate(mine, None, outputs=True)
        for _ in range(trains):
            engine.step(mine, mine)
        result = engine.evaluate(mine, mine, outputs=True) if said and trains else None
        inference = torch.inference_mode(mesh == "dp=2")
        with inference, pytest.raises(MisfitError, match=refusal) if said else nullcontext():
            engine.evaluate(mine, mine)
        if result is not None:
            with pytest.raises(MisfitError, match=refusal):
                result.loss  # noqa: B018

    run_local(2, work)


def test_what_is_set_between_steps_is_examined_in_the_next_evaluation():
    def work(transport):
        block, x = OtherInEvaluations(MEAN, MEAN), torch.ones(4, WIDTH)
        engine = engine_of(transport, [block, nn.Linear(WIDTH, WIDTH)])
        engine.step(x, x)
        engine.evaluate(x, x)
        block.other = SUM
        engine.step(x, x)
        with pytest.raises(MisfitError, match=r"in evaluations, block 0 .* in training it is a mean"):
            engine.evaluate(x, x)

    run_local(2, work)
