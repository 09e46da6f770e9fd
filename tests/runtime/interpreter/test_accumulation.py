"""Steps of several calls: skipped as a whole, compared as microbatches are, and what is tried between them."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local

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


class Adding(torch.nn.Linear):
    """Returns a loss of its own beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = super().forward(x).tanh()
        return found, found.square().mean()


class Spread(torch.nn.Linear):
    """Returns a number of all samples beside its output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        return {"logits": found, "spread": found.std()}


@pytest.mark.parametrize(
    ("block", "loss", "says"),
    [
        (Adding, F.cross_entropy, "a microbatch has 5 for 6"),
        (Spread, lambda o, t: F.cross_entropy(o["logits"], t) * o["spread"].detach(), "goes by output['spread']"),
    ],
)
@pytest.mark.parametrize("begins", [0, 3])
def test_calls_of_one_microbatch_are_compared(block: type, loss: Any, says: str, begins: int) -> None:
    plan, targets = qs.compile("1f1b", mesh="pp=1", microbatches=1), torch.arange(6) % 3
    random = torch.Generator().manual_seed(0)

    def run(transport: Transport) -> None:
        engine = Engine(plan, [block(3, 3)], loss, adam, transport=transport)
        for _ in range(begins):
            engine.step(torch.randn(6, 3, generator=random), targets)
        engine.step(torch.randn(6, 3, generator=random), targets, last=False)
        with pytest.raises(MisfitError, match=re.escape(says)):
            engine.step(torch.randn(6, 3, generator=random), targets.where(targets.cumsum(0) != 1, -100))

    run_local(1, run)
