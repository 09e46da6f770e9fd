"""Losses that are means or sums: over a batch they are those of all of it, however it is cut; others are refused."""

from __future__ import annotations

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
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import build_model
from quintsched.runtime.comm import run_local
from quintsched.runtime.comm.random_generators import draws_undone
from quintsched.runtime.losses.weighted_losses import WeighedLoss
from quintsched.runtime.settings.run_settings import LossOver

from ...helpers.training import check_equality
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
    plan, batch = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2), (INPUTS, targets)
    check_equality(plan, BLOCKS, loss_fn, sgd, [batch], evaluated=batch)


def with_a_penalty(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets) + 0.1 * output.square().mean()


def test_what_the_loss_of_one_microbatch_is_over_is_no_matter() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    engine = Engine(plan, BLOCKS, with_a_penalty, sgd, dtype=torch.float64)
    output = build_model(BLOCKS, 0, torch.float64)(INPUTS)
    assert engine.step(INPUTS, LABELS).loss.item() == pytest.approx(with_a_penalty(output, LABELS).item(), rel=1e-12)
    with pytest.raises(MisfitError, match="microbatch"):
        engine.step(INPUTS, LABELS, microbatches=2)


@pytest.mark.parametrize("over", ["samples", "microbatch"])
def test_what_is_stated_is_not_examined(over: LossOver) -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    engine = Engine(plan, BLOCKS, with_a_penalty, sgd, dtype=torch.float64, loss_over=over)
    output = build_model(BLOCKS, 0, torch.float64)(INPUTS)
    parts = [with_a_penalty(output[some], LABELS[some]).item() * n for some, n in ((slice(4), 4), (slice(4, 7), 3))]
    assert engine.step(INPUTS, LABELS).loss.item() == pytest.approx(sum(parts) / 7, rel=1e-12)


class Drawn(nn.Module):
    """A loss that draws, and counts."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))
        self.draw, self.calls, self.seen = draw, 0, list[float]()

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.center.add_(1)
        self.seen.append(self.draw())
        return F.mse_loss(output, targets) * self.seen[-1]


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, np.random.rand])
def test_a_loss_draws_and_moves_as_often_as_it_is_called(draw: Callable[[], float]) -> None:
    outputs = torch.randn(3, 7, CLASSES, generator=RANDOM).requires_grad_()
    with draws_undone():
        alone = Drawn(draw)
        expected = [alone(output, FLAGS) for output in outputs]
        drawn = draw()
    mine = Drawn(draw)
    weighed = WeighedLoss(mine)
    found = [weighed(output, FLAGS, 7) for output in outputs]
    assert draw() == drawn
    assert mine.calls == alone.calls
    assert mine.seen == alone.seen
    assert torch.equal(mine.center, alone.center)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.loss * one.times / one.weight, other)


class Annealed(nn.Module):
    """A loss that goes by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, targets) * min(1.0, self.calls / 100)


def test_a_loss_that_goes_by_its_calls_is_refused() -> None:
    plan, loss_fn = qs.compile("1f1b", mesh="pp=1", microbatches=2), Annealed()
    engine = Engine(plan, BLOCKS, loss_fn, sgd, dtype=torch.float64)
    with pytest.raises(MisfitError, match="once for each microbatch"):
        engine.step(INPUTS, FLAGS)
    assert loss_fn.calls == 2


def test_a_mean_that_a_block_has_found_is_refused() -> None:
    loss = WeighedLoss(lambda output, targets: output)
    loss(F.cross_entropy(torch.randn(7, CLASSES, requires_grad=True), LABELS), LABELS, 7)
    assert 'loss_over="samples"' in loss.refusal


def test_sums_of_short_types_are_float32() -> None:
    output = torch.full((40_000, 2), 4.0, dtype=torch.bfloat16)
    output[:, 0] = -4.0
    targets = torch.zeros(40_000, dtype=torch.int64)
    total, weight, *_ = WeighedLoss(F.cross_entropy)(output, targets, 40_000)
    assert total.dtype is torch.float32
    assert total / weight == F.cross_entropy(output, targets).float()


def without_pads(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets != 0
    losses = F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="none")
    return (losses * counts.flatten()).sum(), counts.sum()


def clamped(output: Tensor, targets: Tensor) -> Tensor:
    total, count = without_pads(output, targets)
    return total / count.clamp(min=1)


def absent(output: Tensor, targets: Tensor) -> Tensor:
    total, count = without_pads(output, targets)
    return total / count if count else output.sum() * 0


def ignored(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=0)


@pytest.mark.parametrize("loss_fn", [clamped, absent, ignored])
def test_a_microbatch_of_nothing_weighs_nothing_however_a_loss_says_so(loss_fn: Callable[..., Any]) -> None:
    inputs, targets = torch.arange(8).view(8, 1) % 7, torch.tensor([[1], [0], [0], [2], [0], [0], [0], [4]])
    blocks = [lambda: nn.Embedding(7, 6), lambda: nn.Linear(6, 7)]
    engine = Engine(qs.compile("gpipe", mesh="pp=1", microbatches=8), blocks, loss_fn, sgd, dtype=torch.float64)
    total, count = without_pads(build_model(blocks, dtype=torch.float64)(inputs), targets)
    for found in (engine.evaluate(inputs, targets), engine.step(inputs, targets)):
        assert found.weight.item() == count == 3
        assert found.loss.item() == pytest.approx((total / count).item(), rel=1e-12)


NONE_OF_TWO = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 0, 1, 0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "labels", "right"),
    [
        (NONE_OF_TWO, [4, 2, 0, 1], None),
        (lambda o, t: ((t - o[:, 0]).abs() * (t != 0)).sum() / (t != 0).sum(), [0, 0, 9, 3], None),
        (lambda o, t: ((t - o[:, 0]).abs() * (t != 0)).sum() / (t != 0).sum().clamp(min=1), [0, 0, 0, 0], 0.0),
    ],
)
def test_what_weighs_nothing_later_leaves_the_others_gradients(
    loss: Any, labels: list[int], right: float | None
) -> None:
    inputs, targets = torch.randn(4, 6, dtype=torch.float64), torch.tensor(labels)
    blocks = [lambda: nn.Linear(6, 5)]
    engine = Engine(qs.compile("gpipe", mesh="pp=1", microbatches=4), blocks, loss, sgd, dtype=torch.float64)
    engine.step(inputs, torch.tensor([1, 3, 0, 1]) + 3 * (loss is not NONE_OF_TWO))
    module = nn.Linear(6, 5, dtype=torch.float64)
    module.load_state_dict({name.partition(".")[2]: value for name, value in engine.full_weights().items()})
    whole = loss(module(inputs), targets)
    found = engine.step(inputs, targets)
    assert not found.skipped
    assert found.loss.item() == pytest.approx(whole.item() if right is None else right)


def test_a_loss_says_always_or_never_what_it_weighs() -> None:
    def sometimes(output: Tensor, targets: Tensor) -> Any:
        total, count = F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()
        return (total, count) if count else total

    for labels in (LABELS, LABELS.flip(0)):
        engine = Engine(qs.compile("gpipe", mesh="pp=1", microbatches=7), BLOCKS, sometimes, sgd, dtype=torch.float64)
        with pytest.raises(MisfitError, match=r"return \(sum, weight\) always"):
            engine.step(INPUTS, labels.roll(3))


def test_a_metric_of_no_weight_is_not_a_number_and_adds_nothing():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def run(transport):
        torch.manual_seed(0)
        engine = Engine(
            plan,
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            nn.functional.mse_loss,
            lambda weights: torch.optim.SGD(weights, lr=0.1),
            metrics={
                "precision": lambda output, y: (torch.zeros(()), torch.zeros(())),
                "diverged": lambda output, y: (torch.tensor(torch.nan), torch.ones(())),
            },
            transport=transport,
        )
        return engine.step(torch.ones(4, 2), torch.ones(4, 2))

    for result in run_local(2, run):
        assert result.metrics["precision"].isnan()
        assert result.metrics["diverged"].isnan()
        assert result.sums["precision"] == 0
        assert result.sums["diverged"].isnan()
