"""Losses that give (sum, weight): what is no sum, or does not weigh as one, is refused; what is, is left alone."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.losses.experiments.stated_weights import StatedExamination

from ...helpers.training import call_with_share
from ..trials import engine_of, refused

CLASSES, TOKENS = 5, 6
RANDOM = torch.Generator().manual_seed(3)
LABELS = torch.tensor([1, 3, 2, -100, -100, 4, 0, 2])
LOGITS = torch.randn(2, TOKENS, CLASSES, generator=RANDOM)
IDS = torch.randint(0, CLASSES, (2, TOKENS), generator=RANDOM)
BLOCKS = [partial(nn.Linear, 4, 8), partial(nn.Linear, 8, CLASSES)]


def of(reduction: str, output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction=reduction)


def kept(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


SOUND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda output, targets: (of("sum", output, targets), kept(targets)),
    "float": lambda output, targets: (of("sum", output, targets), float(targets.numel())),
    "times": lambda output, targets: (output.square().mean() * targets.numel(), targets.numel()),
    "of outputs": lambda output, targets: (of("sum", output, targets), output.detach().abs().sum()),
    "tokens": lambda output, targets: (output.square().sum((0, 1)).mean(), len(output) * output.shape[1] / TOKENS),
    "sample's mean": lambda output, targets: (output.square().mean((1, 2)).sum(), len(output)),
    "handed on": lambda output, targets: (output.sum() if len(output) == 2 else 1 / 0, len(output)),
}
UNSOUND: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "mean": (lambda output, targets: (of("mean", output, targets), len(targets)), "is a mean of"),
    "mean of kept": (lambda output, targets: (of("mean", output, targets), kept(targets)), "is a mean of"),
    "mean and 1": (lambda output, targets: (output.square().mean(), 1), "is a mean of"),
    "sum and 1": (lambda output, targets: (output.square().sum(), 1), "weight is 1, and of each 1 and 1"),
    "clamped": (lambda output, targets: (of("sum", output, targets), kept(targets).clamp(min=1)), "the weight is"),
    "rmse": (lambda output, targets: (output.square().mean().sqrt() * len(output), len(output)), "not the sum"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SOUND)
def test_a_sum_with_its_weight_is_left_alone(name: str) -> None:
    assert StatedExamination(SOUND[name], LOGITS, IDS, 2, sliced=True).examine_loss().why == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNSOUND)
def test_what_is_no_sum_with_its_weight_is_doubted(name: str) -> None:
    loss, words = UNSOUND[name]
    assert words in StatedExamination(loss, LOGITS, IDS, 2).examine_loss().why


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
def test_a_mean_with_a_weight_is_refused_on_all_ranks_unless_it_is_meant(mesh: str) -> None:
    batches, loss = [(torch.randn(8, 4, generator=RANDOM), LABELS)], UNSOUND["mean"][0]
    said = refused(BLOCKS, batches, loss, mesh)
    assert 'reduction="sum"), (targets != -100).sum()' in said
    assert 'loss_over="microbatch"' in said

    def run(transport: Transport) -> float:
        meant = engine_of(transport, BLOCKS, loss, mesh, loss_over="microbatch")
        return call_with_share(meant, meant.step, batches[0]).weight.item()  # type: ignore[no-any-return]

    assert set(run_local(qs.Mesh.parse(mesh).size, run)) == {8}


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_a_weight_with_a_gradient_is_refused_whenever_it_comes(mesh: str) -> None:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = output.sigmoid() if targets[0, 0] > 0 else output.detach().sigmoid()
        return (weights * (output - targets).square()).sum(), weights.sum()

    batches = [(torch.ones(8, 4), sign * torch.ones(8, CLASSES)) for sign in (-1, 1)]
    said = refused(BLOCKS, batches, loss, mesh, microbatches=1)
    assert re.search(r"its weight has a gradient.*weight\.detach\(\)", said)
