"""Layers with hooks, own forwards, or weights that are read or held beside modules are kept whole over tp."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime.parallel.cut_proofs.block_twins import require_held_once

from ....helpers.blocks import of_kind
from ....helpers.training import require_equal
from ...examine.backward_blocks import backward_of
from .odd_blocks import HIDDEN, Mlp, made
from .training import SCALED, Between, Seeing, refusal, train, verdict

READS: list[Between] = [
    lambda self, y: y * 0.5 if self.training and self.fc1.weight.abs().max() > 99 else y,
    lambda self, y: y / self.fc2.weight.data.norm().clamp(min=99),
    lambda self, y: y + F.relu(self.fc1.bias.sum() - 99) if not self.training else y,
    lambda self, y: y * sum(p.square().sum() for p in self.parameters()).clamp(max=1e-3),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", READS)
def test_layers_whose_weights_are_read_are_whole(between: Between, caplog: pytest.LogCaptureFixture) -> None:
    assert verdict(between).endswith("whole: 0.fc1, 0.fc2")
    assert "'0.fc1' and '0.fc2' are kept whole over tp, since it gives the weights of '0.fc" in caplog.text


def drop_connect(self: Any, input: Tensor) -> Tensor:
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


def scale(layer: Any) -> None:
    layer.forward = MethodType(lambda self, x: F.linear(x, self.weight, self.bias) * 0.5, layer)


def triple(layer: Any) -> None:
    layer.weight = Tripled(layer.weight.detach())


def halved(p: Tensor) -> None:
    p.grad.mul_(0.5)


HOOKS, FORWARDS = "whole for hooks on their weights: 0.fc", "whole for forwards of their own: 0.fc1"
NO_HOOKS = "a plain Linear without hooks, also on its weights"
CASES: list[tuple[type[nn.Linear], Callable[[Any], object], str, str]] = [
    (nn.Linear, lambda layer: layer.weight.register_hook(lambda g: g * 0.5), HOOKS, NO_HOOKS),
    (nn.Linear, lambda layer: layer.bias.register_hook(lambda g: g / g.norm()), HOOKS, NO_HOOKS),
    (nn.Linear, lambda layer: layer.weight.register_post_accumulate_grad_hook(halved), HOOKS, NO_HOOKS),
    (of_kind(nn.Linear, drop_connect), id, FORWARDS, "has 'forward'"),
    (Late, id, FORWARDS, "has '__call__'"),
    (nn.Linear, scale, FORWARDS, "it has 'forward'"),
    (nn.Linear, triple, FORWARDS, "its weights are of type 'Tripled'"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "change", "said", "why"), CASES)
def test_layers_with_hooks_on_weights_or_forwards_of_their_own_are_whole(kind, change, said, why):
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


class Taking(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def caught(self: Any, y: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(y[0].mT @ y[0] + torch.eye(HIDDEN))[:1] + y
    except RuntimeError:
        return y - y.mean(-1, keepdim=True)


BESIDE: dict[str, dict[str, Any]] = {
    "Listed": {
        "has": lambda self: {"held": [{"w": self.fc1.weight}]},
        "between": lambda self, y: torch.tanh(y) * self.held[0]["w"].detach().norm(),
    },
    "Closed": {
        "has": lambda self: {"run": lambda x: self.fc2(torch.softmax(self.fc1(x), -1))},
        "forward": lambda self, x: x + self.run(x),
    },
    "Partial": {
        "has": lambda self: {"rows": partial(F.linear, weight=self.fc2.weight)},
        "forward": lambda self, x: x + self.rows(torch.tanh(self.fc1(x))),
    },
}
FUNCTION = backward_of(lambda gradient: gradient)
OTHERS: dict[str, dict[str, Any]] = {
    "Catching": {"between": caught},
    "Wrapped": {"between": lambda self, y: torch.tanh(y.as_subclass(Taking)).as_subclass(Tensor)},
    "Functional": {"between": lambda self, y: 2 * FUNCTION(y)},
    "Plain": {},
}
KINDS = made({Mlp: BESIDE | OTHERS})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_such_blocks_train_over_tp_as_one_process_does(name, caplog):
    kind = KINDS[name]
    if name in BESIDE:
        block = kind()
        with pytest.raises(MisfitError, match=r"^'(held|run|rows)' holds .* beside its modules$"):
            require_held_once(block, [block.fc1, block.fc2])
    (alone,) = train("pp=1", [kind], microbatches=1)
    require_equal(train("tp=2", [kind], microbatches=1), alone, 1e-12)
    said = "kept whole over tp" if name in BESIDE else "cut one by one over tp"
    assert (said in caplog.text) == (name != "Plain")
