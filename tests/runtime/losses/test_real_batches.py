"""Findings on a loss are compared with real microbatches: a later one, or a loop, may show another denominator."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine

from ...helpers.training import call_with_share
from ..trials import engine_of, on_ranks, refused, step

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["pp=1", "dp=2,pp=2"])
def test_a_later_microbatch_shows_what_the_first_has_not(mesh: str) -> None:
    said = refused(BLOCKS, [(INPUTS, LABELS)], in_batches, **settings_of(mesh))
    assert "in step 0 it is not so" in said
    assert "return (sum, weight)" in said
    large = [(INPUTS, NUMBERS)] * 3 + [(INPUTS, 1e6 * NUMBERS)]
    assert "in step 3 it is not so" in refused(BLOCKS, large, by_size, **settings_of(mesh))


TABLE = torch.arange(200) % CLASSES
TABLE[CLASSES] = -100
SETTING = np.zeros(1 << 18)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["pp=1", "dp=2,pp=2"])
def test_what_comes_late_is_seen_in_that_step_by_values(mesh: str) -> None:
    void = LABELS.clone()
    void[0] = void[2] = 5  # as many in each microbatch of the first replica

    def change(_: Any, number: int) -> None:
        SETTING[500] = number == 3

    set_it = {"change": change}
    for loss, usual, late, more in (
        (lambda o, t: F.cross_entropy(o, TABLE[t]) + 0.1 * o.square().mean(), LABELS, void, {}),
        (
            lambda o, t: F.mse_loss(o, t) + float(SETTING[500]) * o.var(0, unbiased=False).mean(),
            NUMBERS,
            NUMBERS,
            set_it,
        ),
        (lambda o, t: (F.cross_entropy(o, TABLE[t]) * len(t), len(t)), LABELS, void, {}),
    ):
        batches = [(INPUTS, usual)] * 3 + [(INPUTS, late)]
        said = refused(BLOCKS, batches, loss, **settings_of(mesh), **more)
        assert "in step 3 it is not so: of all together it is" in said


def test_a_loss_that_changes_what_it_is_given_is_refused() -> None:
    def relabelled(output: Tensor, targets: Tensor) -> Tensor:
        targets[targets == CLASSES] = -100
        return F.cross_entropy(output, targets)

    for loss in (relabelled, lambda output, targets: F.cross_entropy(output.div_(2), targets)):
        said = refused(BLOCKS, [(INPUTS, LABELS.clone())], loss, **settings_of("pp=1"))
        assert "write targets = targets.masked_fill(…)" in said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["pp=1", "dp=2,pp=2"])
def test_a_loss_without_gradient_is_examined_when_it_has_one(mesh: str) -> None:
    batches = [(INPUTS, (NUMBERS, factor)) for factor in (0.0, 1.0)]
    rooted = lambda output, targets: targets[1] * (output - targets[0]).square().mean().sqrt()  # noqa: E731
    said = refused(BLOCKS, batches, rooted, **settings_of(mesh))
    assert "of microbatches it is not that of the batch" in said


def test_what_a_loop_changes_is_seen_in_that_step() -> None:
    batches, loss, weighted = [(INPUTS, torch.arange(8))] * 4, Scheduled(), Scheduled()
    weights = torch.rand(CLASSES, generator=RANDOM, dtype=torch.float64)

    def change(_: Any, number: int) -> None:
        loss.alpha = float(number == 3)

    def weigh(_: Any, number: int) -> None:
        weighted.weight = weights if number == 3 else None

    said = refused(BLOCKS, batches, loss, change=change, **settings_of("dp=2,pp=2"))
    assert "since the loss (Scheduled).alpha has changed" in said
    assert len(step(BLOCKS, batches, weighted, change=weigh, **settings_of("pp=1"))[0]) == 4


def test_weights_of_a_loss_that_nobody_trains_are_refused() -> None:
    class Learnt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return self.scale * F.mse_loss(output, targets)

    with pytest.raises(UsageError, match=r"requires_grad_\(False\)"):
        engine_of(None, BLOCKS, Learnt(), **settings_of("pp=1"))
    engine_of(None, BLOCKS, Learnt().requires_grad_(requires_grad=False), **settings_of("pp=1"))


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
        except MisfitError as error:
            return str(error)
        return ""

    blocks = [lambda: nn.Linear(4, 4)]
    for said in on_ranks(work, blocks, loss, mesh="dp=2", microbatches=1, dtype=torch.float64):
        assert ("unlike numbers of things for a sample" in said) is not is_right


@pytest.mark.parametrize(("mesh", "microbatches"), [("pp=1", 1), ("pp=1", 4), ("dp=2", 1), ("dp=2,pp=2", 2)])
def test_a_metric_that_is_a_sum_is_over_samples_whatever_microbatches_there_are(mesh: str, microbatches: int) -> None:
    torch.manual_seed(0)
    blocks = [nn.Linear(8, 8), nn.Linear(8, CLASSES)]
    inputs, right = torch.randn(8, 8), lambda output, targets: (output.argmax(-1) == targets).sum()
    targets = blocks[1](blocks[0](inputs)).argmax(-1)
    targets[:3] = (targets[:3] + 1) % CLASSES

    def work(engine: Engine) -> tuple[float, float, float]:
        result = call_with_share(engine, engine.step, (inputs, targets))
        return float(result.metrics["right"]), float(result.weight), float(result.sums["right"])

    more = {"microbatches": microbatches, "metrics": {"right": right}}
    assert {*on_ranks(work, blocks, F.cross_entropy, mesh=mesh, **more)} == {(5 / 8, 8, 5)}
