"""Steps of several calls: skipped as a whole, compared as microbatches are, and what is tried between them."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quintsched as qs
from quintsched.runtime import Engine

from ...helpers.blocks import of_kind
from ...helpers.training import call_with_share
from ..toys import adam
from ..trials import copied, on_ranks, require_same


def test_a_large_batch_that_is_not_finite_is_skipped_as_a_whole() -> None:
    random = torch.Generator().manual_seed(0)
    good, other = torch.randn(2, 4, 3, generator=random).unbind()

    def work(engine: Engine) -> bool:
        before = copied(engine.full_weights())

        def step(x: Tensor, *, last: bool) -> bool:
            return call_with_share(engine, partial(engine.step, last=last), (x, good)).skipped

        assert not step(torch.full_like(good, torch.inf), last=False)
        assert step(other, last=True)
        require_same(engine.full_weights(), before)
        assert not step(other, last=False)
        return not step(good, last=True)

    loss = lambda x, y: (x - y).square().sum()  # noqa: E731
    assert all(on_ranks(work, [torch.nn.Linear(3, 3)], loss, mesh="dp=2", microbatches=1, optimizer=adam))


def linear(self: Any, x: Tensor) -> Tensor:
    return torch.nn.Linear.forward(self, x)


@pytest.mark.parametrize(
    ("forward", "loss", "says"),
    [
        (lambda self, x: (y := linear(self, x).tanh(), y.square().mean()), F.cross_entropy, "has 5 for 6"),
        (
            lambda self, x: {"logits": (y := linear(self, x)), "spread": y.std()},
            lambda o, t: F.cross_entropy(o["logits"], t) * o["spread"].detach(),
            "goes by output['spread']",
        ),
    ],
    ids=["a loss beside the output", "a number of all samples"],
)
@pytest.mark.parametrize("begins", [0, 3])
def test_calls_of_one_microbatch_are_compared(forward: Any, loss: Any, says: str, begins: int) -> None:
    plan, targets = qs.compile("1f1b", mesh="pp=1", microbatches=1), torch.arange(6) % 3
    engine = Engine(plan, [of_kind(torch.nn.Linear, forward)(3, 3)], loss, adam)
    for _ in range(begins):
        engine.step(torch.randn(6, 3), targets)
    engine.step(torch.randn(6, 3), targets, last=False)
    with pytest.raises(qs.MisfitError, match=re.escape(says)):
        engine.step(torch.randn(6, 3), targets.where(targets.cumsum(0) != 1, -100))
