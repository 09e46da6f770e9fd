"""Losses on several stages: their sum, and the gradients, are those of one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry

from ...helpers.training import Outcome, require_equal, train_alone, train_ranks
from ..toys import sgd

SIZE, CLASSES, SAMPLES, STEPS = 6, 5, 12, 2


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross entropy, and how many samples count."""
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets >= 0).sum()


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Exit(nn.Linear):
    """An early exit: a head of its own, and its loss beside what goes on."""

    def __init__(self, share: float) -> None:
        super().__init__(SIZE, CLASSES)
        self.share = share

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, summed(super().forward(x), targets)[0] * self.share


class Sends(Layer):
    def forward(self, x: Tensor) -> Carry:  # type: ignore[override]
        y = super().forward(x)
        return Carry(y, early=y)


class Takes(nn.Linear):
    """The last head, which looks at an early output as well."""

    def forward(self, x: Tensor, early: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + early)


def blocks() -> list[Any]:
    """Two blocks for each of four stages, or four for each of two; exits on stages 1 and 2, or on both."""
    return [Sends, Layer, Layer, partial(Exit, 0.3), partial(Exit, 0.7), Layer, Layer, partial(Takes, SIZE, CLASSES)]


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, SIZE, generator=random, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=random)
    targets[4] = -100
    return inputs, targets


def train(name: str, model: Sequence[Any] | None = None, steps: int = STEPS, **shape: Any) -> list[Outcome]:
    plan, own = qs.compile(name, **{"microbatches": 6, **shape}), blocks() if model is None else model
    more: dict[str, Any] = {"dtype": torch.float64, "block_costs": [1.0] * len(own), "evaluated": data()}
    return train_ranks(plan, own, summed, sgd, [data()] * steps, **more)


FOUR: dict[str, Any] = {"losses": (1, 2, 3), "skip": {"early": (0, 3)}}
TWO: dict[str, Any] = {"losses": (0, 1), "skip": {"early": (0, 1)}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("interleaved-1f1b", {"mesh": "pp=2", **FOUR}),
        ("zbv", {"mesh": "pp=2", **FOUR, "recompute": (0, 2, 1, 0)}),
        ("1f1b", {"mesh": "dp=2,pp=4", **FOUR, "zero": 3}),
        ("1f1b", {"mesh": "pp=2,tp=2", **TWO}),
        ("1f1b", {"mesh": "pp=1"}),
    ],
)
def test_losses_on_several_stages_equal_one_process(name: str, shape: dict[str, Any]) -> None:
    require_equal(train(name, **shape), train_alone(blocks(), summed, sgd, [data()] * STEPS, evaluated=data()))


class Wrong(Layer):
    def forward(self, x: Tensor) -> Carry:  # type: ignore[override]
        return Carry(x, targets=x)


@pytest.mark.parametrize(
    ("shape", "model", "words"),
    [
        ({"mesh": "pp=4"}, blocks(), "no loss there: compile it with --losses 1,2,3"),
        ({"mesh": "pp=4", "losses": (0, 1, 2, 3)}, blocks(), "a loss on stage 0, but none of its 2 blocks returns one"),
        ({"mesh": "pp=1"}, [Wrong, Layer], "block 0 sends 'targets' along, but there is something else of that name"),
    ],
)
def test_losses_that_are_not_where_the_plan_has_them_are_refused(shape: Any, model: list[Any], words: str) -> None:
    with pytest.raises(qs.MisfitError, match=words):
        train("1f1b", model, **shape)
