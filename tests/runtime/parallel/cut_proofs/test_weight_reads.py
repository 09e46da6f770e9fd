"""Layers whose weights the model gives to functions, with hooks on them, or own forwards, are kept whole over tp."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime.comm import run_local

from .test_features_apart import Between, said_of, train


def largest(self: Any, y: Tensor) -> Tensor:
    return y * 0.5 if self.training and self.fc1.weight.abs().max() > 99 else y


READS: list[Callable[[Any, Tensor], Tensor]] = [
    largest,
    lambda self, y: y / self.fc2.weight.data.norm().clamp(min=99),
    lambda self, y: y + F.relu(self.fc1.bias.sum() - 99) if not self.training else y,
    lambda self, y: y * sum(p.square().sum() for p in self.parameters()).clamp(max=1e-3),
]
HOOKS: list[Callable[[Any], Any]] = [
    lambda block: block.fc1.weight.register_hook(lambda g: g * 0.5),
    lambda block: block.fc2.bias.register_hook(lambda g: g / g.norm()),
    lambda block: block.fc1.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", READS)
def test_layers_whose_weights_are_read_are_whole(
    between: Callable[[Any, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    assert said_of(between).endswith("whole: 0.fc1, 0.fc2")
    assert "'0.fc1' and '0.fc2' are kept whole over tp, for it gives the weights of '0.fc" in caplog.text


def test_types_and_sizes_of_weights_may_be_read() -> None:
    assert "pairs proved" in said_of(lambda self, y: y.to(self.fc2.weight.dtype) + 0 * self.fc2.weight.dim())


@pytest.mark.parametrize("rule", ["column", {"cut": "column", "alone": True}])
def test_a_rule_that_cuts_a_layer_whose_weights_are_read_is_refused(rule: Any) -> None:
    with pytest.raises(MisfitError, match=r"cannot be cut at '0.fc1'.*, for it gives .* in line .*: rules=\{'\*.fc1'"):
        run_local(
            2, lambda tr: train(tr, "tp=2", lambda: Between(largest), rules={"*.fc1": rule, "*.fc2": "replicate"})
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hook", HOOKS)
def test_layers_with_hooks_on_their_weights_are_whole(hook: Callable[[Any], Any]) -> None:
    class Hooked(Between):
        def __init__(self) -> None:
            super().__init__(lambda self, y: y)
            hook(self)

    def block() -> nn.Module:
        return Hooked()

    meant = {"loss_over": "microbatch"}  # one of the hooks divides by a norm
    (alone, _), *_ = run_local(1, lambda transport: train(transport, "pp=1", block, **meant))
    losses, said = run_local(2, lambda transport: train(transport, "tp=2", block, **meant))[0]
    assert losses == pytest.approx(alone, rel=1e-8)
    assert "whole: 0.fc1, 0.fc2; whole for hooks on their weights: 0.fc" in said
    with pytest.raises(MisfitError, match="a plain Linear without hooks, also on its weights"):
        run_local(2, lambda transport: train(transport, "tp=2", block, rules={"*.fc?": "row"}))


class Dropping(nn.Linear):
    """DropConnect."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, F.dropout(self.weight, 0.5, self.training), self.bias)


class Late(nn.Linear):
    """Does something else once it was called three times."""

    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(x if self.calls <= 3 else x.clamp(-0.1, 0.1))


class Tripled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found * 3 if func is F.linear else found


class Named(nn.Linear):
    """A linear layer by another name."""


def scaled(layer: nn.Linear) -> nn.Linear:
    layer.forward = MethodType(lambda self, x: F.linear(x, self.weight, self.bias) * 0.5, layer)  # type: ignore[method-assign]
    return layer


def tripled(layer: nn.Linear) -> nn.Linear:
    layer.weight = Tripled(layer.weight.detach())
    return layer


OWN: dict[str, Callable[[int, int], nn.Linear]] = {
    "has 'forward'": Dropping,
    "has '__call__'": Late,
    "it has 'forward'": lambda *sizes: scaled(nn.Linear(*sizes)),
    "its weights are of type 'Tripled'": lambda *sizes: tripled(nn.Linear(*sizes)),
}


class Made(Between):
    def __init__(self, make: Callable[[int, int], nn.Linear]) -> None:
        super().__init__(lambda self, y: F.gelu(y))
        self.fc1 = make(self.fc1.in_features, self.fc1.out_features)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("why", OWN)
def test_layers_with_forwards_of_their_own_are_whole(why: str) -> None:
    def block() -> nn.Module:
        return Made(OWN[why])

    (alone, _), *_ = run_local(1, lambda transport: train(transport, "pp=1", block))
    losses, said = run_local(2, lambda transport: train(transport, "tp=2", block))[0]
    assert losses == pytest.approx(alone, rel=1e-8)
    assert "whole: 0.fc1, 0.fc2; whole for forwards of their own: 0.fc1" in said
    with pytest.raises(MisfitError, match=rf"{why}; keep it whole, by a rule before others: {{'0.fc1': 'replicate'}}"):
        run_local(2, lambda transport: train(transport, "tp=2", block, rules={"*.fc1": "column"}))


@pytest.mark.slow
def test_a_linear_layer_by_another_name_is_cut() -> None:
    _, said = run_local(2, lambda transport: train(transport, "tp=2", lambda: Made(Named)))[0]
    assert "pairs proved" in said
