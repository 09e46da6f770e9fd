"""Steps of several calls: skipped as a whole, compared as microbatches are, and what is tried between them."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local

from ...helpers.blocks import of_kind
from ..toys import adam, share


def test_a_large_batch_that_is_not_finite_is_skipped_as_a_whole() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=1)
    random = torch.Generator().manual_seed(0)
    good, other = torch.randn(2, 4, 3, generator=random).unbind()

    def run(transport: Transport) -> bool:
        engine = Engine(plan, [torch.nn.Linear(3, 3)], lambda x, y: (x - y).square().sum(), adam, transport=transport)
        before = {name: weight.clone() for name, weight in engine.full_weights().items()}

        def step(x: Tensor, *, last: bool) -> bool:
            return engine.step(*share(engine, x, good), last=last).skipped

        assert not step(torch.full_like(good, torch.inf), last=False)
        assert step(other, last=True)
        after = engine.full_weights()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        assert not step(other, last=False)
        return not step(good, last=True)

    assert all(run_local(2, run))


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
