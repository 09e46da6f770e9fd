"""Losses whose gradients are not in proportion to what a microbatch weighs are refused; sums are not."""

import pytest
import torch
from torch.nn import functional as F

from quintsched.runtime.losses.experiments.stated_weights import StatedExamination
from quintsched.runtime.losses.experiments.sum_or_mean import LossExamination
from quintsched.runtime.losses.loss_reductions import Over

RANDOM = torch.Generator().manual_seed(5)
OUTPUT, TARGETS = (torch.randn(4, 3, generator=RANDOM, dtype=torch.float64) for _ in range(2))


class Signs(torch.autograd.Function):
    """Goes by no gradient that it is given."""

    @staticmethod
    def forward(ctx, off):
        ctx.save_for_backward(off)
        return off.abs().sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].sign()


def hooked(hook, reduce):
    def loss(output, targets):
        off = output - targets
        if off.requires_grad:
            off.register_hook(hook)
        return reduce(off)

    return loss


def clamp(gradient):
    return gradient.clamp(-0.01, 0.01)


def pair(off):
    return off.pow(2).sum(), float(off.numel())


@pytest.mark.parametrize(
    ("loss", "over"),
    [
        (hooked(lambda g: 0.5 * g, lambda off: off.pow(2).mean()), Over.TOKENS),
        (lambda output, targets: Signs.apply(output - targets), Over.SUM),
        (hooked(clamp, lambda off: off.pow(2).sum()), Over.SUM),
        (hooked(torch.sign, lambda off: off.pow(2).mean()), None),
        (hooked(clamp, lambda off: off.pow(2).mean()), None),
        (lambda output, targets: Signs.apply(output - targets) / output.numel(), None),
    ],
)
def test_one_number(loss, over):
    weight = LossExamination(loss, OUTPUT, TARGETS, 4).examine_loss().weight
    assert (weight and weight.over) == over


@pytest.mark.parametrize(
    ("loss", "is_right"),
    [
        (hooked(torch.neg, pair), True),
        (lambda output, targets: (F.mse_loss(output, targets, reduction="sum"), len(output)), True),
        (hooked(clamp, pair), False),
        (lambda output, targets: (Signs.apply(output - targets), float(output.numel())), False),
    ],
)
def test_sum_and_weight(loss, is_right):
    doubt = StatedExamination(loss, OUTPUT, TARGETS, 4).examine_loss().why
    assert ("as a clamp or a sign does" in doubt) != is_right
    assert not (doubt and is_right)
