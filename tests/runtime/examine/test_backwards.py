"""Blocks whose backward is not linear in the gradient are found, wherever that is written."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quintsched.runtime.examine.gradients.nonlinear_backwards import calls_own, why_unlinear
from quintsched.runtime.guards.custom_backwards import Code

from .backward_blocks import ARRIVAL, CLAMP, INSTALLED, LINEAR, OTHERS, SEEN, Block, tried


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_gradients_that_are_not_linear_are_found(name):
    block = {**LINEAR, **OTHERS}[name]
    assert Code(block).is_suspect
    found = why_unlinear(tried(block), ARRIVAL)
    assert found.why.startswith("block 3 (") == (name in OTHERS)
    assert found.adds == (name in ("decay of its own", "loss added"))
    assert block.inner.weight.grad is None
    assert not SEEN  # as hooks have not run


@torch.library.custom_op("quintsched_tests::clamped", mutates_args=())
def clamped(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


clamped.register_autograd(lambda ctx, gradient: gradient.clamp(-0.01, 0.01))


class Helper:
    def __call__(self, x):
        return CLAMP(x)


class Named(Block):
    def forward(self, x):
        return getattr(self, "_ch" + "ange")(self.inner(x))

    def _change(self, x):
        return functools.partial(*self.change)(x)


class HookingByName(Block):
    def forward(self, x):
        x = self.inner(x)
        getattr(x if self.change is None else x.grad_fn, "register" + (self.change or "_hook"))(lambda *g: None)
        return x


def with_forward_hook():
    block = Block()
    block.inner.register_forward_hook(lambda module, given, made: INSTALLED.clamp(made))
    return block


HIDDEN = {
    "function of an installed package": Block(INSTALLED.clamp),
    "object that is called": Block(Helper()),
    "behind an underscore, by a string": Named((CLAMP,)),
    "reentrant checkpoint": Block(lambda x: checkpoint(INSTALLED.clamp, x, use_reentrant=True)),
    "other checkpoint": Block(lambda x: checkpoint(INSTALLED.clamp, x, use_reentrant=False)),
    "custom operator": Block(torch.ops.quintsched_tests.clamped),
    "forward hook": with_forward_hook(),
    "tensor hook, by a string": HookingByName(None),
    "hook of a node, by a string": HookingByName("_prehook"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_wherever_it_is_written_one_run_shows_it(name):
    block = HIDDEN[name]
    code = Code(block)
    assert code.is_suspect or code.has_more
    assert calls_own(tried(block), ARRIVAL)
    is_linear = "hook" in name and "string" in name
    assert ("as a clamp does" in why_unlinear(tried(block), ARRIVAL).why) != is_linear
    assert not calls_own(tried(Block()), ARRIVAL)
    assert not calls_own(tried(Block(lambda x: checkpoint(torch.tanh, x, use_reentrant=True))), ARRIVAL)


def test_plain_blocks_are_not_run():
    for block in (Block(), Block(F.relu), nn.TransformerEncoderLayer(4, 2), nn.Linear(2, 2)):
        code = Code(block)
        assert not code.is_suspect
        assert not code.has_more
