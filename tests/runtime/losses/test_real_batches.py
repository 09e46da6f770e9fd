"""Findings on a loss are compared with real microbatches: a later one, or a loop, may show another denominator.

What weighs nothing, or is beside losses of blocks, is as over all of the batch.
"""

import re
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

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import call_with_share, check_equality
from ..toys import sgd
from ..trials import engine_of, on_ranks, ones, refused, step

CLASSES = 5
BLOCKS = [partial(nn.Linear, 4, 8), partial(nn.Linear, 8, CLASSES)]
RANDOM = torch.Generator().manual_seed(3)
INPUTS = torch.randn(8, 4, generator=RANDOM, dtype=torch.float64)
LABELS = torch.randint(0, CLASSES, (8,), generator=RANDOM)
NUMBERS = torch.randn(8, CLASSES, generator=RANDOM, dtype=torch.float64)


class Scheduled(nn.Module):
    """Cross-entropy, and `alpha` times the root of a mean, which a loop turns on; `weight` is of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.weight = 0.0, None

    def forward(self, output: Tensor, targets: Any) -> Tensor:
        loss = F.cross_entropy(output, LABELS[targets], self.weight)
        return loss + self.alpha * output.square().mean().sqrt() if self.alpha else loss


def by_size(output: Tensor, targets: Tensor) -> Tensor:
    losses = (output - targets).square()
    return losses.mean() if targets.abs().max() < 1e5 else losses.mean().sqrt()


def in_batches(output: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(output, targets, reduction="none")
    return losses.mean() if len(losses) != len(LABELS) else losses.topk(CLASSES).values.mean()


def settings_of(mesh: str) -> dict[str, Any]:
    return {"mesh": mesh, "microbatches": 2 if "dp" in mesh else 4, "dtype": torch.float64}


def rooted(output: Tensor, targets: Any) -> Tensor:
    return targets[1] * (output - targets[0]).square().mean().sqrt()


TABLE = torch.arange(200) % CLASSES
TABLE[CLASSES] = -100
SETTING, SCHEDULED, WEIGHED = np.zeros(1 << 18), Scheduled(), Scheduled()
VOID = torch.where(torch.tensor([1, 0, 1, 0, 0, 0, 0, 0]) > 0, 5, LABELS)
"""As many ignored labels in each microbatch of the first replica."""


def set_it(_: Any, number: int) -> None:
    SETTING[500] = SCHEDULED.alpha = float(number == 3)
    WEIGHED.weight = NUMBERS[0].abs() if number == 3 else None


NOT_SO = "in step 3 it is not so: of all together it is"
LATE: dict[str, tuple[Any, list[Any], str]] = {
    "a later microbatch": (in_batches, [LABELS], r"in step 0 it is not so.*return \(sum, weight\)"),
    "large numbers": (by_size, [NUMBERS] * 3 + [1e6 * NUMBERS], "in step 3 it is not so"),
    "ids": (lambda o, t: F.cross_entropy(o, TABLE[t]) + 0.1 * o.square().mean(), [LABELS] * 3 + [VOID], NOT_SO),
    "ids, with a weight": (lambda o, t: (F.cross_entropy(o, TABLE[t]) * len(t), len(t)), [LABELS] * 3 + [VOID], NOT_SO),
    "a number of the host": (
        lambda o, t: F.mse_loss(o, t) + float(SETTING[500]) * o.var(0, unbiased=False).mean(),
        [NUMBERS] * 4,
        NOT_SO,
    ),
    "a gradient": (rooted, [(NUMBERS, 0.0), (NUMBERS, 1.0)], "of microbatches it is not that of the batch"),
    "an attribute": (SCHEDULED, [torch.arange(8)] * 4, r"since the loss \(Scheduled\)\.alpha has changed"),
    "weights": (WEIGHED, [torch.arange(8)] * 4, r"since the loss \(Scheduled\)\.weight has changed"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["pp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("name", LATE)
def test_what_comes_late_is_seen_in_that_step(name: str, mesh: str) -> None:
    loss, targets, says = LATE[name]
    said = refused(BLOCKS, [(INPUTS, one) for one in targets], loss, change=set_it, **settings_of(mesh))
    assert re.search(says, said, re.DOTALL)


def test_a_loss_that_changes_what_it_is_given_is_refused() -> None:
    def relabelled(output: Tensor, targets: Tensor) -> Tensor:
        targets[targets == CLASSES] = -100
        return F.cross_entropy(output, targets)

    for loss in (relabelled, lambda output, targets: F.cross_entropy(output.div_(2), targets)):
        said = refused(BLOCKS, [(INPUTS, LABELS.clone())], loss, **settings_of("pp=1"))
        assert "write targets = targets.masked_fill(…)" in said


def test_weights_of_a_loss_that_nobody_trains_are_refused() -> None:
    def scaled(self: Any, output: Tensor, targets: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, targets)

    learnt = of_layers("Learnt", lambda: {"scale": nn.Parameter(torch.ones(()))}, scaled)
    with pytest.raises(qs.UsageError, match=r"requires_grad_\(False\)"):
        engine_of(None, BLOCKS, learnt(), **settings_of("pp=1"))
    engine_of(None, BLOCKS, learnt().requires_grad_(requires_grad=False), **settings_of("pp=1"))


class Beside(nn.Linear):
    """Gives what belongs to no sample beside its output."""

    def __init__(self, find: Callable[[Tensor], Tensor]) -> None:
        super().__init__(8, CLASSES)
        self.find, self.scale = find, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x), "rest": self.find(x), "scale": self.scale.exp()}


def with_rest(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output["scale"] * output["logits"], targets) + output["rest"].square().sum()


RESTS: dict[str, tuple[Any, Any, str]] = {
    "spread": (lambda x: x.std(), with_rest, "goes by output['rest']"),
    "gram": (lambda x: x[:, :3].T @ x[:, :3] / len(x), with_rest, "goes by output['rest']"),
    "handed on": (lambda x: x.square().mean(), lambda output, _: output["rest"], 'loss_over="samples"'),
    "divisor": (lambda x: (x > 0).sum() + 1, lambda o, _: o["logits"].sum() / o["rest"], "goes by output['rest']"),
    "stated": (lambda x: x.square().sum(), lambda o, _: (o["rest"], len(o["logits"])), ""),
    "unused": (lambda x: x.std(), lambda o, targets: F.cross_entropy(o["scale"] * o["logits"], targets), ""),
    "the same": (lambda x: torch.ones(1), with_rest, ""),
}


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("name", RESTS)
def test_what_belongs_to_no_sample_is_the_same_in_all_microbatches(mesh: str, name: str) -> None:
    find, loss, said = RESTS[name]
    for found in step([BLOCKS[0], partial(Beside, find)], [(INPUTS, LABELS)], loss, **settings_of(mesh)):
        assert said in str(found[-1])
        assert isinstance(found[-1], str) == bool(said)


@pytest.mark.parametrize(
    ("loss", "is_right"),
    [
        (F.mse_loss, False),
        (lambda o, t: (o - t).square().mean((1, 2)).mean(), False),
        (lambda o, t: (o - t).square().sum((1, 2)).mean(), True),
        (lambda o, t: ((o - t).square().sum(), o.numel()), True),
    ],
)
def test_a_mean_over_unlike_numbers_for_a_sample_is_refused(loss: Any, is_right: bool) -> None:
    def work(engine: Engine) -> str:
        x = torch.randn(3, 5 + 2 * engine.replica, 4, dtype=torch.float64)
        try:
            engine.step(x, x.flip(0))
        except qs.MisfitError as error:
            return str(error)
        return ""

    blocks = [lambda: nn.Linear(4, 4)]
    for said in on_ranks(work, blocks, loss, mesh="dp=2", microbatches=1, dtype=torch.float64):
        assert ("unlike numbers of things for a sample" in said) is not is_right


@pytest.mark.parametrize("stated", [{}, {"loss_over": "samples"}])
@pytest.mark.parametrize(("mesh", "microbatches"), [("pp=1", 1), ("pp=1", 4), ("dp=2", 1), ("dp=2,pp=2", 2)])
def test_a_metric_that_is_a_sum_is_over_samples_whatever_microbatches_there_are(mesh, microbatches, stated):
    blocks = [nn.Linear(8, 8), nn.Linear(8, CLASSES)]
    inputs, right = torch.randn(8, 8), lambda output, targets: (output.argmax(-1) == targets).sum()
    targets = blocks[1](blocks[0](inputs)).argmax(-1)
    targets[:3] = (targets[:3] + 1) % CLASSES

    def work(engine: Engine) -> tuple[float, float, float]:
        result = call_with_share(engine, engine.step, (inputs, targets))
        return float(result.metrics["right"]), float(result.weight), float(result.sums["right"])

    more = {"microbatches": microbatches, "metrics": {"right": right}, **stated}
    assert {*on_ranks(work, blocks, F.cross_entropy, mesh=mesh, **more)} == {(5 / 8, 8, 5)}


NONE_OF_TWO = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 0, 1, 0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "labels", "right"),
    [
        (NONE_OF_TWO, [4, 2, 0, 1], None),
        (lambda o, t: ((t - o[:, 0]).abs() * (t != 0)).sum() / (t != 0).sum(), [0, 0, 9, 3], None),
        (lambda o, t: ((t - o[:, 0]).abs() * (t != 0)).sum() / (t != 0).sum().clamp(min=1), [0, 0, 0, 0], 0.0),
    ],
)
def test_what_weighs_nothing_later_leaves_the_others_gradients(loss, labels, right):
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


EVERY = torch.tensor([1, 4, 2, 3, 0, 4, 0, 2])
UNEVEN = torch.tensor([1, -100, -100, 3, 0, 4, 0, -100])
EVEN = torch.tensor([1, -100, 2, -100, -100, 4, 0, -100])


def penalised(reduction: Any = torch.mean) -> list[Any]:
    """Return blocks of which the first has a loss of its own, over samples."""

    def forward(self: Any, x: Tensor) -> Any:
        found = nn.Linear.forward(self, x)
        return found, reduction(found.square().sum(1))

    return [partial(of_kind(nn.Linear, forward), 4, 8), partial(nn.Linear, 8, CLASSES)]


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
    check_equality(plan, penalised(reduction), loss, sgd, [(INPUTS[: len(labels)], labels)])


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=2"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_mean_over_uneven_targets_is_refused_beside_them(mesh: str, is_first: bool) -> None:
    batches = [(INPUTS, EVERY)] * (not is_first) + [(INPUTS, UNEVEN)]
    for told in step(penalised(), batches, F.cross_entropy, mesh, dtype=torch.float64):
        assert re.search(r"blocks have losses of their own .* return \(sum, weight\)", told[-1])
