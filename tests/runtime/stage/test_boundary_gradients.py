"""What crosses stages requires a gradient where it does in one process; a stage that gives none back is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine

STEPS, WIDTH = 5, 4


class Layer(nn.Linear):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() if self.stops else x
        return x + torch.tanh(super().forward(x))


class Asking(Layer):
    """Goes by whether it is given something that requires a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.requires_grad else 0.5 * x)


class Reentrant(Layer):
    """Trains where its input requires a gradient, and only there."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return output


class Codes(nn.Embedding):
    """Embeds the largest feature, through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1))


def model(kind: Callable[[], nn.Module] = Layer) -> list[nn.Module]:
    torch.manual_seed(0)
    return [block.double() for block in (Layer(), Layer(), kind(), kind(), nn.Linear(WIDTH, 3))]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


Change = Callable[[list[nn.Module], int], object]


def train_alone(blocks: list[nn.Module], change: Change) -> list[float]:
    whole, losses = nn.Sequential(*blocks), []
    optimizer = adam(whole.parameters())
    for step in range(STEPS):
        change(blocks, step)
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(kind: Callable[[], nn.Module], change: Change) -> list[list[float]]:
    blocks = model(kind)
    return run_local(2, lambda transport: train_rank(transport, copy.deepcopy(blocks), change))


def train_rank(transport: Transport, blocks: list[nn.Module], change: Change) -> list[float]:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    engine = Engine(plan, blocks, F.cross_entropy, adam, transport=transport)
    losses = []
    for step in range(STEPS):
        change(blocks, step)
        inputs, targets = (t.chunk(engine.num_replicas)[engine.replica] for t in batch(step))
        losses.append(engine.step(inputs, targets).loss.item())
    return losses


def freeze(blocks: list[nn.Module], step: int, *, count: int, since: int = 0, until: int = STEPS) -> None:
    for block in blocks[:count]:
        block.requires_grad_(not since <= step < until)


FROZEN = {
    "all before, asked": (Asking, partial(freeze, count=2)),
    "all before, asked, for a while": (Asking, partial(freeze, count=2, since=1, until=3)),
    "the first, reentrant": (Reentrant, partial(freeze, count=2)),
    "the first, reentrant, for a while": (Reentrant, partial(freeze, count=2, since=2, until=4)),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("kind", "change"), FROZEN.values(), ids=FROZEN)
def test_what_frozen_stages_send_requires_no_gradient(kind: Any, change: Any) -> None:
    expected = train_alone(model(kind), change)
    for found in train(kind, change):
        assert found == pytest.approx(expected, abs=1e-12)


def stop(blocks: list[nn.Module], step: int) -> None:
    setattr(blocks[3], "stops", step == 1)  # noqa: B010


@pytest.mark.parametrize(("kind", "change"), [(Codes, lambda *_: None), (Layer, stop)], ids=["argmax", "detach"])
def test_a_stage_that_gives_no_gradient_back_is_refused(kind: Any, change: Any) -> None:
    with pytest.raises(MisfitError, match=r"blocks from \d on give no gradient .* freeze blocks 0 to \d"):
        train(kind, change)


def test_it_trains_once_what_is_before_is_frozen() -> None:
    change = partial(freeze, count=3)
    expected = train_alone(model(Codes), change)
    for found in train(Codes, change):
        assert found == pytest.approx(expected, abs=1e-12)
