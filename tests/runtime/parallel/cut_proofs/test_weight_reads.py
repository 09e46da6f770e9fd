"""Layers whose weights the model gives to functions, with hooks on them, or own forwards, are kept whole over tp."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .training import SCALED, Between, Seeing, refusal, require_equal, train, verdict


def largest(self: Any, y: Tensor) -> Tensor:
    return y * 0.5 if self.training and self.fc1.weight.abs().max() > 99 else y


READS: list[Between] = [
    largest,
    lambda self, y: y / self.fc2.weight.data.norm().clamp(min=99),
    lambda self, y: y + F.relu(self.fc1.bias.sum() - 99) if not self.training else y,
    lambda self, y: y * sum(p.square().sum() for p in self.parameters()).clamp(max=1e-3),
]


def halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


HOOKS: list[Callable[[Any], Any]] = [
    lambda block: block.fc1.weight.register_hook(lambda g: g * 0.5),
    lambda block: block.fc2.bias.register_hook(lambda g: g / g.norm()),
    lambda block: block.fc1.weight.register_post_accumulate_grad_hook(halved),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", READS)
def test_layers_whose_weights_are_read_are_whole(between: Between, caplog: pytest.LogCaptureFixture) -> None:
    assert verdict(between).endswith("whole: 0.fc1, 0.fc2")
    assert "'0.fc1' and '0.fc2' are kept whole over tp, since it gives the weights of '0.fc" in caplog.text


def test_types_and_sizes_of_weights_may_be_read() -> None:
    assert "pairs proved" in verdict(lambda self, y: y.to(self.fc2.weight.dtype) + 0 * self.fc2.weight.dim())


@pytest.mark.parametrize("rule", ["column", {"cut": "column", "alone": True}])
def test_a_rule_that_cuts_a_layer_whose_weights_are_read_is_refused(rule: Any) -> None:
    said = refusal("tp=2", [lambda: Seeing(largest)], rules={"*.fc1": rule, "*.fc2": "replicate"})
    assert re.search(r"cannot be cut at '0.fc1'.*, for it gives .* in line .*: rules=\{'\*.fc1'", said)


def whole(block: Callable[[], nn.Module], rules: dict[str, str], **more: Any) -> tuple[str, str]:
    """Return what is said of a block whose layers are whole over tp, and why rules that cut them are refused."""
    ranks = train("tp=2", [block], SCALED, **more)
    require_equal(ranks, train("pp=1", [block], SCALED, **more)[0], 1e-8)
    return str(ranks[0].engine.tensor_cuts), refusal("tp=2", [block], SCALED, rules=rules, **more)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hook", HOOKS)
def test_layers_with_hooks_on_their_weights_are_whole(hook: Callable[[Any], Any]) -> None:
    def block() -> nn.Module:
        made = Seeing(lambda self, y: y)
        hook(made)
        return made

    said, why = whole(block, {"*.fc?": "row"}, loss_over="microbatch")  # one of the hooks divides by a norm
    assert "whole: 0.fc1, 0.fc2; whole for hooks on their weights: 0.fc" in said
    assert "a plain Linear without hooks, also on its weights" in why


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


def made(make: Callable[[int, int], nn.Linear]) -> Callable[[], nn.Module]:
    def block() -> nn.Module:
        built = Seeing(lambda self, y: F.gelu(y))
        built.fc1 = make(built.fc1.in_features, built.fc1.out_features)
        return built

    return block


@pytest.mark.sampled(4)
@pytest.mark.parametrize("why", OWN)
def test_layers_with_forwards_of_their_own_are_whole(why: str) -> None:
    said, refused = whole(made(OWN[why]), {"*.fc1": "column"})
    assert "whole: 0.fc1, 0.fc2; whole for forwards of their own: 0.fc1" in said
    assert f"{why}; keep it whole, by a rule before others: {{'0.fc1': 'replicate'}}" in refused


@pytest.mark.slow
def test_a_linear_layer_by_another_name_is_cut() -> None:
    assert "pairs proved" in str(train("tp=2", [made(Named)])[0].engine.tensor_cuts)
