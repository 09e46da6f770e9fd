"""Gradients of a microbatch that are no part of the batch's are found, though they are linear."""

import pytest
import torch
from torch import nn

from quintsched.runtime.examine.gradients.microbatch_gradients import why_of_microbatch, why_of_others

from .backward_blocks import ARRIVAL, LINEAR, Block, backward_of, halve, hooked, tried


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        Kept.mask = x > 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Kept.mask


def stepped(weight):
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-0.1)


def sized(x):
    return x / len(x) + (x - x / len(x)).detach()


class Local(Block):
    """Trains by a loss of its own, within its forward."""

    def forward(self, x):
        y = super().forward(x)
        if self.training and torch.is_grad_enabled():
            y.square().sum().backward(retain_graph=True)
        return y


class Written(Block):
    def forward(self, x):
        self.inner.weight.grad = torch.ones_like(self.inner.weight)
        return super().forward(x)


class Cancelling(Block):
    """Has a weight whose gradient is 0 but for rounding, as the bias of keys."""

    def __init__(self):
        super().__init__(torch.tanh)
        self.shift = nn.Parameter(torch.full((1,), 0.3, dtype=torch.float64))

    def forward(self, x):
        return (super().forward(x) + self.shift).softmax(-1)


OF_MICROBATCHES = {
    "local loss": (Local(torch.tanh), "adds a gradient to its 'inner."),
    "gradient written": (Written(torch.tanh), "adds a gradient to its 'inner.weight'"),
    "centred": (Block(backward_of(lambda g: g - g.mean(0))), "mixes samples"),
    "by size": (Block(sized), "mixes samples"),
    "kept on a class": (Block(Kept.apply), "what its latest forward has kept"),
    "halved sums": (hooked("register_post_accumulate_grad_hook", halve), "changes sums"),
    "stepped": (hooked("register_post_accumulate_grad_hook", stepped), "changes weights"),
    **{name: (LINEAR[name], "") for name in LINEAR if name not in ("halved", "log")},
    "cancelling": (Cancelling(), ""),
    "mixed forward": (Block(lambda x: x - x.mean(0)), ""),
    "straight through": (Block(lambda x: x + (x.round() - x).detach()), ""),
}


@pytest.mark.parametrize("name", OF_MICROBATCHES)
def test_gradients_of_a_microbatch_that_are_no_part_of_the_batchs_are_found(name):
    block, said = OF_MICROBATCHES[name]
    before = block.inner.weight.clone()
    found = why_of_microbatch(tried(block), ARRIVAL) or why_of_others(tried(block), ARRIVAL)
    assert torch.equal(before, block.inner.weight)
    assert said in found
    assert bool(said) == bool(found)
    if name == "kept on a class":
        assert not why_of_others(tried(block), ARRIVAL, overtaken=False)
