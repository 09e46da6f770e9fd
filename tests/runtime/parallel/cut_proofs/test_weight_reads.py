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


def scale(layer: Any) -> None:
    layer.forward = MethodType(lambda self, x: F.linear(x, self.weight, self.bias) * 0.5, layer)


def triple(layer: Any) -> None:
    layer.weight = Tripled(layer.weight.detach())


def halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


HOOKS, FORWARDS = "whole for hooks on their weights: 0.fc", "whole for forwards of their own: 0.fc1"
NO_HOOKS = "a plain Linear without hooks, also on its weights"
CASES: list[tuple[type[nn.Linear], Callable[[Any], object], str, str]] = [
    (nn.Linear, lambda layer: layer.weight.register_hook(lambda g: g * 0.5), HOOKS, NO_HOOKS),
    (nn.Linear, lambda layer: layer.bias.register_hook(lambda g: g / g.norm()), HOOKS, NO_HOOKS),
    (nn.Linear, lambda layer: layer.weight.register_post_accumulate_grad_hook(halved), HOOKS, NO_HOOKS),
    (Dropping, id, FORWARDS, "has 'forward'"),
    (Late, id, FORWARDS, "has '__call__'"),
    (nn.Linear, scale, FORWARDS, "it has 'forward'"),
    (nn.Linear, triple, FORWARDS, "its weights are of type 'Tripled'"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "change", "said", "why"), CASES)
def test_layers_with_hooks_on_weights_or_forwards_of_their_own_are_whole(
    kind: type[nn.Linear], change: Callable[[Any], object], said: str, why: str
) -> None:
    def block() -> nn.Module:
        made = Seeing(lambda self, y: F.gelu(y))
        made.fc1 = kind(made.fc1.in_features, made.fc1.out_features)
        change(made.fc1)
        return made

    more = {"loss_over": "microbatch"} if said == HOOKS else {}  # one of the hooks divides by a norm
    ranks = train("tp=2", [block], SCALED, **more)
    require_equal(ranks, train("pp=1", [block], SCALED, **more)[0], 1e-8)
    assert f"whole: 0.fc1, 0.fc2; {said}" in str(ranks[0].engine.tensor_cuts)
    refused = refusal("tp=2", [block], SCALED, rules={"*.fc1": "column"}, **more)
    assert (why if said == HOOKS else f"{why}; keep it whole, by a rule before others: {{'0.fc1': 'rep") in refused


def test_a_linear_layer_by_another_name_is_cut() -> None:
    def block() -> nn.Module:
        made = Seeing(lambda self, y: F.gelu(y))
        made.fc1 = Named(made.fc1.in_features, made.fc1.out_features)
        return made

    assert "pairs proved" in str(train("tp=2", [block])[0].engine.tensor_cuts)
