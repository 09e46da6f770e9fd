"""Losses that are means or sums, also beside losses of blocks: over a batch they are those of all of it."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, build_model

from ...helpers.training import check_equality
from ..toys import sgd
from ..trials import on_ranks, ones, step

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


def test_a_metric_of_no_weight_is_not_a_number_and_adds_nothing() -> None:
    metrics = {
        "precision": lambda output, y: (torch.zeros(()), torch.zeros(())),
        "diverged": lambda output, y: (torch.tensor(torch.nan), torch.ones(())),
    }
    for result in on_ranks(lambda engine: engine.step(*ones(4, 2)[0]), [partial(nn.Linear, 2, 2)] * 2, metrics=metrics):
        assert result.metrics["precision"].isnan()
        assert result.metrics["diverged"].isnan()
        assert result.sums["precision"] == 0
        assert result.sums["diverged"].isnan()


EIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
EVERY = torch.tensor([1, 4, 2, 3, 0, 4, 0, 2])
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


def penalised(reduction: Any = torch.mean) -> list[Any]:
    return [partial(Penalised, 4, 8, reduction), partial(nn.Linear, 8, CLASSES)]


def summed(output: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize(
    ("loss", "labels", "reduction"),
    [
        (F.cross_entropy, EVEN, torch.mean),
        (summed, UNEVEN, torch.sum),
        *((loss, EVERY[:7], reduction) for loss, reduction in ((F.cross_entropy, torch.mean), (summed, torch.sum))),
    ],
    ids=["even", "summed", "seven samples", "seven samples, summed"],
)
def test_losses_of_blocks_are_of_the_kind_of_the_loss(mesh: str, loss: Any, labels: Tensor, reduction: Any) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    check_equality(plan, penalised(reduction), loss, sgd, [(EIGHT[: len(labels)], labels)])


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_mean_over_uneven_targets_is_refused_beside_them(mesh: str, is_first: bool) -> None:
    batches = [(EIGHT, EVERY)] * (not is_first) + [(EIGHT, UNEVEN)]
    for told in step(penalised(), batches, F.cross_entropy, mesh, dtype=torch.float64):
        assert re.search(r"blocks have losses of their own .* return \(sum, weight\)", told[-1])
