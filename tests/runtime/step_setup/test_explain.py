"""Errors of a loss that wants the whole batch say what it was given, what it holds of the batch, and what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import CodeError
from quintsched.runtime import Engine

from ..toys import sgd

WEIGHT = torch.arange(1.0, 5)[:, None]
ROWS = torch.eye(4)


def by_a_permutation(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return (output - targets["y"][targets["p"]]).square().mean()


CASES: dict[str, tuple[Any, Any, str]] = {
    "a weight": (nn.BCEWithLogitsLoss(weight=WEIGHT), ROWS[:, :2], r"\(BCEWithLogitsLoss\)\.weight \(4, 1\) is for"),
    "a closure": (lambda o, y, w=WEIGHT: (w * (o - y)).mean(), ROWS[:, :2], r"loss function\[0\] \(4, 1\) is for"),
    "columns": (lambda o, y: (o @ o.T - y).square().mean(), ROWS, r"samples, and targets \(2, 4\) is for the whole"),
    "a permutation": (by_a_permutation, {"y": ROWS[:, :2], "p": torch.tensor([3, 2, 1, 0])}, r"4 samples: give each"),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_the_whole_batch(name: str) -> None:
    loss, targets, words = CASES[name]
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    engine = Engine(plan, [lambda: nn.Linear(3, 2)], loss, sgd)
    with pytest.raises(CodeError, match=f"here with 2 of this replica's .*{words}"):
        engine.step(torch.ones(4, 3), targets)


def test_a_loss_of_one_microbatch_raises_as_it_is() -> None:
    engine = Engine(qs.compile("1f1b", mesh="dp=1", microbatches=1), [lambda: nn.Linear(3, 2)], nn.MSELoss(), sgd)
    with pytest.raises(CodeError, match="the loss function raised") as raised:
        engine.step(torch.ones(4, 3), torch.ones(4, 7))
    assert "microbatch" not in str(raised.value)
