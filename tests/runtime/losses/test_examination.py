"""Losses from the literature, and some with gradients of their own: what each is weighed by, or that it is refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.runtime.losses.experiments.find_loss_reduction import LossExamination
from quintsched.runtime.losses.experiments.find_metric_reduction import MetricExamination, StatedMetricExamination
from quintsched.runtime.losses.experiments.stated_weights import StatedExamination
from quintsched.runtime.losses.loss_reductions import Over
from quintsched.runtime.losses.save_and_restore_loss_state import versions_kept

from ...helpers.training import call_with_share
from ..trials import on_ranks, refused

CLASSES, TOKENS, SAMPLES = 5, 6, 8
RANDOM = torch.Generator().manual_seed(1)
ROWS = torch.randn(SAMPLES, CLASSES, generator=RANDOM)
IDS = torch.randint(0, CLASSES, (SAMPLES,), generator=RANDOM)
NUMBERS = torch.rand(SAMPLES, CLASSES, generator=RANDOM)
LOGITS = torch.randn(SAMPLES, TOKENS, CLASSES, generator=RANDOM)
LABELS = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=RANDOM)
MASK = (torch.rand(SAMPLES, TOKENS, generator=RANDOM) > 0.4).float()
MASKED = (LABELS, MASK)
CLASS_WEIGHTS = torch.rand(CLASSES, generator=RANDOM) + 0.1
LENGTHS = torch.tensor([1, 2, 1, 2, 2, 1, 1, 2])
CTC = (LABELS[:, :2].clamp(min=1), torch.full((SAMPLES,), TOKENS), LENGTHS)


def examine_loss(loss: Any, output: Any, targets: Any, samples: int, *, sliced: bool = False) -> Any:
    with versions_kept(loss):
        return LossExamination(loss, output, targets, samples, sliced=sliced).examine_loss()


def each(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target, also of such as are negative."""
    rows = F.cross_entropy(output.flatten(0, -2), targets.clamp(min=0).flatten(), reduction="none")
    return rows.view_as(targets)


def kept(targets: Tensor) -> Tensor:
    """Return the targets that are neither of two pads."""
    return (targets != 0) & (targets != 3)


def soft(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and probabilities at a temperature of two."""
    return F.log_softmax(output / 2, -1), F.softmax(targets / 2, -1)


def focal(output: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(output, targets, reduction="none")
    return (CLASS_WEIGHTS.to(losses.dtype)[targets] * (1 - torch.exp(-losses)) ** 2 * losses).mean()


def with_a_gradient(output: Tensor, targets: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
    return F.mse_loss(output, targets) + slope.square().mean()


def by_samples(output: Tensor, targets: Tensor) -> Tensor:
    kept = targets != -100
    return ((each(output, targets) * kept).sum(1) / kept.sum(1)).mean()


class Signs(torch.autograd.Function):
    """Goes by no gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, off: Tensor) -> Tensor:
        ctx.save_for_backward(off)
        return off.abs().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0].sign()


def hooked(hook: Any, reduce: Any) -> Any:
    def loss(output: Tensor, targets: Tensor) -> Any:
        off = output - targets
        if off.requires_grad:
            off.register_hook(hook)
        return reduce(off)

    return loss


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


FOUND: dict[str, tuple[Any, Tensor, Any, Over | None]] = {
    "cross-entropy": (F.cross_entropy, ROWS, IDS, Over.TARGETS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), ROWS, IDS, Over.SUM),
    "sum / constant": (lambda o, t: (o - t).square().sum() / 8, ROWS, NUMBERS, Over.SUM),
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHTS), ROWS, IDS, Over.CLASSES),
    "smoothed": (lambda o, t: F.cross_entropy(o, t, CLASS_WEIGHTS.to(o.dtype), label_smoothing=0.1), ROWS, IDS, None),
    "another pad": (lambda o, t: F.cross_entropy(o, t, ignore_index=255), ROWS, IDS, Over.TARGETS),
    "shifted": (lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten()), LOGITS, LABELS, None),
    "mask": (lambda o, t: (each(o, t[0]) * t[1]).sum() / t[1].sum(), LOGITS, MASKED, Over.NUMBERS),
    "mask, clamped": (lambda o, t: (each(o, t[0]) * t[1]).sum() / (t[1].sum() + 1e-6), LOGITS, MASKED, Over.NUMBERS),
    "gradient": (with_a_gradient, ROWS, NUMBERS, Over.TOKENS),
    "mean of means": (by_samples, LOGITS, LABELS, Over.SAMPLES),
    "focal": (focal, ROWS, IDS, Over.SAMPLES),
    "ctc": (lambda o, t: F.ctc_loss(o.log_softmax(-1).transpose(0, 1), *t), LOGITS, CTC, Over.SAMPLES),
    "distilled": (lambda o, t: F.kl_div(*soft(o, t), reduction="batchmean"), ROWS, NUMBERS, Over.SAMPLES),
    "huber": (nn.HuberLoss(), ROWS, NUMBERS, Over.TOKENS),
    "weights": (lambda o, t: F.mse_loss(o, t, weight=t), ROWS, NUMBERS, Over.NUMBERS),
    "probabilities": (lambda o, t: F.binary_cross_entropy(o, t), ROWS.sigmoid(), NUMBERS, Over.TOKENS),
    "detached": (lambda o, t: F.mse_loss(o.detach(), t), ROWS, NUMBERS, Over.SAMPLES),
    "likelihood": (lambda o, t: F.nll_loss(o.log_softmax(-1), t), ROWS, IDS, Over.TARGETS),
    "soft targets": (lambda o, t: F.cross_entropy(o, t.softmax(-1)), ROWS, NUMBERS, None),
    "flags": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS), ROWS, NUMBERS.round(), Over.SAMPLES),
    "sums of each": (lambda o, t: (o - t).square().sum(-1).mean(), ROWS, NUMBERS, Over.SAMPLES),
    "gradients halved": (hooked(lambda g: 0.5 * g, lambda off: off.pow(2).mean()), ROWS, NUMBERS, Over.TOKENS),
    "gradients clamped of a sum": (hooked(clamp, lambda off: off.pow(2).sum()), ROWS, NUMBERS, Over.SUM),
    "signs of a sum": (lambda o, t: Signs.apply(o - t), ROWS, NUMBERS, Over.SUM),
}


def rows(tree: Any, count: int) -> Any:
    return tuple(leaf[:count] for leaf in tree) if isinstance(tree, tuple) else tree[:count]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("samples", [1, 3, SAMPLES])
@pytest.mark.parametrize("name", FOUND)
def test_a_loss_is_weighed_by_what_it_is_over(name: str, samples: int) -> None:
    loss, output, targets, over = FOUND[name]
    weight, why = examine_loss(loss, rows(output, samples), rows(targets, samples), samples)
    assert weight is not None, why
    assert over is None or weight.over is over
    if name == "another pad":
        assert weight.ignored == 255
    if name == "shifted":
        assert (weight.over, weight.shift) == (Over.TARGETS, 1)


def dice(output: Tensor, targets: Tensor) -> Tensor:
    found = output.sigmoid()
    return 1 - 2 * (found * targets).sum() / (found.sum() + targets.sum())


REFUSED: dict[str, tuple[Callable[..., Tensor], Tensor, Any]] = {
    "two pads": (lambda o, t: (each(o, t) * kept(t)).sum() / kept(t).sum(), LOGITS, LABELS),
    "two pads, clamped": (lambda o, t: (each(o, t) * kept(t)).sum() / kept(t).sum().clamp(min=1), LOGITS, LABELS),
    "rmse": (lambda o, t: F.mse_loss(o, t).sqrt(), ROWS, NUMBERS),
    "by those found": (lambda o, t: o.square().sum() / (t > 0).sum().clamp(min=1), LOGITS, LABELS),
    "maximum": (lambda o, t: F.cross_entropy(o, t, reduction="none").max(), ROWS, IDS),
    "hardest": (lambda o, t: each(o, t).topk(max(1, len(o) // 2)).values.mean(), ROWS, IDS),
    "infonce": (lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))), ROWS, NUMBERS),
    "dice": (dice, ROWS, NUMBERS.round()),
    "two means": (lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().mean(), ROWS, IDS),
    "balanced": (lambda o, t: F.cross_entropy(o, t, 1 / t.bincount(minlength=CLASSES).clamp(1).to(o)), ROWS, IDS),
    "sum / root": (lambda o, t: (o - t).square().sum() / len(o) ** 0.5, ROWS, NUMBERS),
    "signs of gradients": (hooked(torch.sign, lambda off: off.pow(2).mean()), ROWS, NUMBERS),
    "gradients clamped": (hooked(clamp, lambda off: off.pow(2).mean()), ROWS, NUMBERS),
    "signs of a mean": (lambda o, t: Signs.apply(o - t) / o.numel(), ROWS, NUMBERS),
}


@pytest.mark.parametrize("samples", [1, 3, SAMPLES])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_weights_of_microbatches_make_up_is_refused(name: str, samples: int) -> None:
    loss, output, targets = REFUSED[name]
    weight, why = examine_loss(loss, rows(output, samples), rows(targets, samples), samples)
    assert weight is None
    assert why


def of(reduction: str, output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction=reduction)


def pair(off: Tensor) -> tuple[Tensor, float]:
    return off.pow(2).sum(), float(off.numel())


SOME = torch.tensor([1, 3, 2, -100, -100, 4, 0, 2])
BLOCKS = [partial(nn.Linear, 4, 8), partial(nn.Linear, 8, CLASSES)]
TWO = (LOGITS[:2], LABELS[:2])
FOUR = (ROWS[:4].double(), NUMBERS[:4].double())
STATED: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[Tensor, Tensor], str]] = {
    "sum": (lambda o, t: (of("sum", o, t), (t != -100).sum()), TWO, ""),
    "float": (lambda o, t: (of("sum", o, t), float(t.numel())), TWO, ""),
    "times": (lambda o, t: (o.square().mean() * t.numel(), t.numel()), TWO, ""),
    "of outputs": (lambda o, t: (of("sum", o, t), o.detach().abs().sum()), TWO, ""),
    "tokens": (lambda o, t: (o.square().sum((0, 1)).mean(), len(o) * o.shape[1] / TOKENS), TWO, ""),
    "sample's mean": (lambda o, t: (o.square().mean((1, 2)).sum(), len(o)), TWO, ""),
    "handed on": (lambda o, t: (o.sum() if len(o) == 2 else 1 / 0, len(o)), TWO, ""),
    "mean": (lambda o, t: (of("mean", o, t), len(t)), TWO, "is a mean of"),
    "mean of kept": (lambda o, t: (of("mean", o, t), (t != -100).sum()), TWO, "is a mean of"),
    "mean and 1": (lambda o, t: (o.square().mean(), 1), TWO, "is a mean of"),
    "sum and 1": (lambda o, t: (o.square().sum(), 1), TWO, "weight is 1, and of each 1 and 1"),
    "clamped": (lambda o, t: (of("sum", o, t), (t != -100).sum().clamp(min=1)), TWO, "the weight is"),
    "rmse": (lambda o, t: (o.square().mean().sqrt() * len(o), len(o)), TWO, "not the sum"),
    "gradients turned": (hooked(torch.neg, pair), FOUR, ""),
    "squares": (lambda o, t: (F.mse_loss(o, t, reduction="sum"), len(o)), FOUR, ""),
    "gradients clamped": (hooked(clamp, pair), FOUR, "as a clamp or a sign does"),
    "signs": (lambda o, t: (Signs.apply(o - t), float(o.numel())), FOUR, "as a clamp or a sign does"),
}


@pytest.mark.parametrize("name", STATED)
def test_a_sum_with_its_weight_is_left_alone_and_what_is_none_is_doubted(name: str) -> None:
    loss, given, words = STATED[name]
    is_sliced = given is TWO and not words
    why = StatedExamination(loss, *given, len(given[0]), sliced=is_sliced).examine_loss().why
    assert words in why
    assert bool(words) == bool(why)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
def test_a_mean_with_a_weight_is_refused_on_all_ranks_unless_it_is_meant(mesh: str) -> None:
    batches, loss = [(torch.randn(8, 4, generator=RANDOM), SOME)], STATED["mean"][0]
    said = refused(BLOCKS, batches, loss, mesh)
    assert 'reduction="sum"), (targets != -100).sum()' in said
    assert 'loss_over="microbatch"' in said
    weights = on_ranks(
        lambda meant: call_with_share(meant, meant.step, batches[0]).weight.item(),
        BLOCKS,
        loss,
        mesh=mesh,
        loss_over="microbatch",
    )
    assert set(weights) == {8}


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_a_weight_with_a_gradient_is_refused_whenever_it_comes(mesh: str) -> None:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = output.sigmoid() if targets[0, 0] > 0 else output.detach().sigmoid()
        return (weights * (output - targets).square()).sum(), weights.sum()

    batches = [(torch.ones(8, 4), sign * torch.ones(8, CLASSES)) for sign in (-1, 1)]
    said = refused(BLOCKS, batches, loss, mesh, microbatches=1)
    assert re.search(r"its weight has a gradient.*weight\.detach\(\)", said)


def test_slices_of_sequences_have_to_hold_too() -> None:
    def examined(loss: Any) -> Any:
        return examine_loss(loss, LOGITS, LABELS, SAMPLES, sliced=True)

    assert not examined(lambda o, t: each(o, t).sum(1).mean()).weight.by_slices
    assert examined(by_samples).weight is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("metric", "over"),
    [
        (lambda o, t: (o.argmax(-1) == t).sum(), Over.SUM),
        (lambda o, t: (o.argmax(-1) == t).float().mean(), Over.SAMPLES),
        (lambda o, t: (o.argmax(-1) == t)[t != -100].float().mean(), Over.TARGETS),
        (lambda o, t: (o.argmax(-1) == t).float().std(), None),
        (lambda o, t: (o.abs() > 15).any().float(), None),
        (lambda o, t: (lambda far: (far > 20 * far.mean()).float().mean())(o.abs().amax(1)), None),
    ],
)
def test_a_metric_is_a_sum_or_a_mean(metric: Any, over: Over | None) -> None:
    weight, why = MetricExamination(metric, ROWS, IDS, SAMPLES).examine_loss()
    assert (weight is None) == bool(why)
    assert (weight and weight.over) == over


@pytest.mark.parametrize(
    ("metric", "is_sound"),
    [
        (lambda o, t: ((o.argmax(-1) == t).sum(), len(t)), True),
        (lambda o, t: (0.5, 1), True),
        (lambda o, t: (o.abs().max(), 1), False),
        (lambda o, t: ((o.argmax(-1) == t).float().mean(), 1), False),
    ],
)
def test_a_metric_that_says_its_weight_is_the_quotient_of_the_sums(metric: Any, is_sound: bool) -> None:
    finding = StatedMetricExamination(metric, ROWS, IDS, SAMPLES).examine_loss()
    assert (finding.weight is not None) is is_sound


@pytest.mark.parametrize("threshold", [0.05, 0.5, 5.0, 500.0])
def test_what_branches_on_numbers_of_the_batch_is_met_at_all_sizes(threshold: float) -> None:
    def clamped(output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output, targets).clamp(min=threshold)

    assert examine_loss(clamped, ROWS, NUMBERS, SAMPLES).why


@pytest.mark.parametrize("rare", [7, 57])
def test_a_rare_class_that_weighs_more_counts_though_no_data_have_it_so_far(rare: int) -> None:
    weights = torch.ones(64)
    weights[rare] = 10.0
    generator = torch.Generator().manual_seed(0)
    output, targets = torch.randn(8, 64, generator=generator), torch.randint(0, 6, (8,), generator=generator)
    assert examine_loss(nn.CrossEntropyLoss(weight=weights), output, targets, 8).weight.over is Over.CLASSES
    assert examine_loss(nn.CrossEntropyLoss(), output, targets, 8).weight.over is Over.TARGETS
