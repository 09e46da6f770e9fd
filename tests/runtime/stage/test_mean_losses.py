"""Losses that are means: over a batch they are the mean of all of it, however it is cut; others are warned of once."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.blocks import build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.comm.device import draws_undone
from quintsched.runtime.stage.mean_losses import WeighedLoss

from ..toys import sgd

CLASSES = 5
BLOCKS = [partial(nn.Linear, 4, 8), partial(nn.Linear, 8, CLASSES)]
RANDOM = torch.Generator().manual_seed(3)
WEIGHTS = torch.rand(CLASSES, generator=RANDOM, dtype=torch.float64)
INPUTS = torch.randn(7, 4, generator=RANDOM, dtype=torch.float64)
LABELS = torch.tensor([1, -100, 2, -100, -100, 4, 0])
FLAGS = torch.rand(7, CLASSES, generator=RANDOM, dtype=torch.float64)


def smoothed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, WEIGHTS, label_smoothing=0.1)


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """As the losses of transformers are: in float32 at least, flattened, by keywords."""
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    return nn.functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=-100, reduction="mean")


CASES: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "cross_entropy": (F.cross_entropy, LABELS),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=-100), LABELS),
    "smoothed": (smoothed, LABELS),
    "of_tokens": (of_tokens, LABELS),
    "nll_loss": (lambda output, targets: F.nll_loss(output.log_softmax(-1), targets), LABELS),
    "probabilities": (nn.CrossEntropyLoss(), FLAGS.softmax(-1)),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), FLAGS.round()),
    "mse": (F.mse_loss, FLAGS),
    "weighted": (lambda output, targets: F.mse_loss(output, targets, weight=targets), FLAGS),
    "huber": (nn.HuberLoss(), FLAGS),
    "kl": (nn.KLDivLoss(reduction="batchmean"), FLAGS),
    "plain": (lambda output, targets: (output - targets).square().sum(-1).mean(), FLAGS),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_mean_over_uneven_microbatches_is_that_of_one_process(name: str) -> None:
    loss_fn, targets = CASES[name]
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)

    def run(transport: Transport) -> tuple[float, float, dict[str, Tensor]]:
        engine = Engine(plan, BLOCKS, loss_fn, sgd, transport=transport, dtype=torch.float64)
        mine = slice(0, 4) if engine.replica == 0 else slice(4, 7)
        evaluated = engine.evaluate(INPUTS[mine], targets[mine]).loss.item()
        return evaluated, engine.step(INPUTS[mine], targets[mine]).loss.item(), engine.full_weights()

    model = build_model(BLOCKS, 0, torch.float64)
    optimizer = sgd(list(model.parameters()))
    loss = loss_fn(model(INPUTS), targets)
    loss.backward()
    optimizer.step()
    expected = dict(model.named_parameters())
    for evaluated, found, weights in run_local(4, run):
        assert evaluated == pytest.approx(loss.item(), rel=1e-12)
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key].detach(), rtol=1e-12, atol=1e-12)


def test_a_microbatch_whose_targets_are_all_ignored_counts_for_nothing() -> None:
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=7)
    engine = Engine(plan, BLOCKS, F.cross_entropy, sgd, dtype=torch.float64)
    model = build_model(BLOCKS, 0, torch.float64)
    found = engine.step(INPUTS, LABELS)
    assert found.loss.item() == pytest.approx(F.cross_entropy(model(INPUTS), LABELS).item(), rel=1e-12)
    assert found.weight.item() == 4


def test_a_mean_that_is_only_a_part_of_the_loss_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def with_a_penalty(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) + 0.1 * output.square().mean()

    weighed = WeighedLoss(with_a_penalty, tells_apart=True)
    output = torch.randn(7, CLASSES, requires_grad=True)
    for _ in range(3):
        assert isinstance(weighed(output, LABELS), Tensor)
    assert len([record for record in caplog.records if "(targets != -100).sum()" in record.message]) == 1


def test_a_loss_that_is_another_when_it_is_watched_is_left_alone() -> None:
    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return F.l1_loss(output, targets, weight=targets)  # torch forgets the weight where a mode is entered

    weighed, output = WeighedLoss(loss_fn, tells_apart=True), torch.randn(7, CLASSES, dtype=torch.float64)
    expected = loss_fn(output, FLAGS)
    for _ in range(2):
        found = weighed(output, FLAGS)
        if isinstance(found, tuple):
            found = found[0] / found[1]
        torch.testing.assert_close(found, expected)


class Centered(nn.Module):
    """A loss that draws, and moves with what it is given."""

    def __init__(self, draw: Callable[[], float], name: str) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))
        self.draw, self.calls, self.options = draw, 0, {"weight" if name == "odd" else "reduction": None}

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.center.mul_(0.5).add_(output.detach().mean(0))
        weight = self.draw() + (targets if "weight" in self.options else 0)
        if "weight" in self.options:
            return F.l1_loss(output - self.center, targets, weight=weight)
        return F.mse_loss(output - self.center, targets) * weight


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, np.random.rand])
@pytest.mark.parametrize("name", ["even", "odd"])
def test_a_loss_draws_and_moves_as_often_as_it_is_called(draw: Callable[[], float], name: str) -> None:
    outputs = torch.randn(3, 7, CLASSES, generator=RANDOM).requires_grad_()
    with draws_undone():
        alone = Centered(draw, name)
        expected = [alone(output, FLAGS) for output in outputs]
        drawn = draw()
    mine = Centered(draw, name)
    weighed = WeighedLoss(mine, tells_apart=True)
    found = [weighed(output, FLAGS) for output in outputs]
    assert draw() == drawn
    assert mine.calls == alone.calls
    assert torch.equal(mine.center, alone.center)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0] / one[1] if isinstance(one, tuple) else one, other)


def test_a_loss_with_a_weight_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def summed(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output, targets, reduction="sum"), 4

    with caplog.at_level(logging.WARNING):
        found = WeighedLoss(summed, tells_apart=True)(torch.randn(7, CLASSES), LABELS)
    assert found[1] == 4
    assert not caplog.records


def test_a_mean_that_was_found_before_is_known_by_its_graph() -> None:
    output = torch.randn(7, CLASSES, requires_grad=True)
    found = F.cross_entropy(output, LABELS)
    total, weight = WeighedLoss(lambda output, targets: found, tells_apart=True)(output, LABELS)
    assert weight == 4
    torch.testing.assert_close(total, found * 4)


def test_sums_of_short_types_are_added_up_in_float32() -> None:
    output = torch.full((40_000, 2), 4.0, dtype=torch.float16)
    output[:, 0] = -4.0
    total, weight = WeighedLoss(F.cross_entropy, tells_apart=True)(output, torch.zeros(40_000, dtype=torch.int64))
    assert total.dtype is torch.float32
    assert (total / weight).item() == pytest.approx(8.0, rel=1e-3)


def masked_mean(output: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != 0).to(output.dtype)
    losses = nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "pp=2"])
def test_a_mean_of_ones_own_is_a_sum_and_what_it_is_divided_by(mesh: str) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randint(7, (8, 5)), torch.randint(4, (8, 5))
    blocks = [lambda: nn.Embedding(7, 6), lambda: nn.Linear(6, 7)]
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4)
    whole = build_model(blocks, dtype=torch.float64)

    def run(transport: Transport) -> float:
        engine = Engine(plan, blocks, masked_mean, torch.optim.SGD, dtype=torch.float64, transport=transport)
        mine = slice(engine.replica * 8 // engine.num_replicas, (engine.replica + 1) * 8 // engine.num_replicas)
        return engine.step(inputs[mine], targets[mine]).loss.item()

    for loss in run_local(plan.mesh.size, run):
        assert abs(loss - masked_mean(whole(inputs), targets).item()) <= 1e-12
