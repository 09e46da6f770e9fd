"""What a block draws is the same in a first step, a later one and a resumed one, however its forward is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.runtime import Engine

drawn: list[Tensor] = []


def noise(x: Tensor) -> Tensor:
    found = torch.randn(x.shape[0], 4)
    drawn.append(found)
    return found


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)


class NotSelf(Base):
    def forward(this, x: Tensor) -> Tensor:
        return this.mix(x) * noise(x)


class Lambda(Base):
    def __init__(self) -> None:
        super().__init__()
        mix = self.mix
        self.forward = lambda x: mix(x) * noise(x)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Decorated(Base):
    @wrapped
    def forward(this, x: Tensor) -> Tensor:
        return this.mix(x) * noise(x)


class Bound(Base):
    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(_forward, self)


def _forward(module: Bound, x: Tensor) -> Tensor:
    return module.mix(x) * noise(x)


class Helper:
    def times(self, x: Tensor) -> Tensor:
        return x * noise(x)


class Helped(Base):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(this, x: Tensor) -> Tensor:
        return this.helper.times(this.mix(x))


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mix.register_forward_hook(lambda module, given, output: output * noise(output))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class RunAgain(Base):
    """What draws is run again within the backward."""

    def forward(this, x: Tensor) -> Tensor:
        return checkpoint(lambda y: y * noise(y), this.mix(x), use_reentrant=False)


class HelpedAgain(Helped):
    def forward(this, x: Tensor) -> Tensor:
        return checkpoint(this.helper.times, this.mix(x), use_reentrant=False)


KINDS = [NotSelf, Lambda, Decorated, Bound, Helped, Hooked, RunAgain, HelpedAgain]


def make(kind: type[nn.Module]) -> Engine:
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    return Engine(plan, [kind, kind], nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), seed=1)


def step(engine: Engine, draws: int = 4) -> list[Tensor]:
    """Return the last that is drawn in a step; before that a first one finds out shapes."""
    drawn.clear()
    engine.step(torch.ones(4, 4), torch.zeros(4, 4))
    return drawn[-draws:]


@pytest.mark.parametrize("kind", KINDS)
def test_draws_of_a_step_are_the_same_after_a_resume(kind: type[nn.Module]) -> None:
    engine, draws = make(kind), 8 if kind in (RunAgain, HelpedAgain) else 4
    step(engine)
    resumed = make(kind)
    resumed.load_state_dict(engine.state_dict())
    expected, found = step(engine, draws), step(resumed, draws)
    assert len(expected) == draws
    assert all(map(torch.equal, found, expected))
    assert len({tuple(numbers.flatten().tolist()) for numbers in expected}) == 4


@pytest.mark.parametrize("kind", KINDS[:6])
def test_draws_do_not_depend_on_hooks_of_others(kind: type[nn.Module]) -> None:
    plain, hooked = make(kind), make(kind)
    for module in hooked.stages[0].modules():
        module.register_forward_pre_hook(lambda module, given: None)
        module.register_forward_hook(lambda module, given, output: None)
    assert all(map(torch.equal, step(hooked), step(plain)))
