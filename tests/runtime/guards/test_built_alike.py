"""Functions that give another block at each call are refused on all ranks; draws, and what blocks share, are none."""

import random
import re
from functools import partial

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, run_local
from quintsched.runtime.blocks.block_builders import build_block, on_meta
from quintsched.runtime.guards.repeatable_builders import why_unlike


class Layer(nn.Module):
    made = 0

    def __init__(self, width=3, **own):
        super().__init__()
        self.fc = nn.Linear(3, width)
        self.__dict__.update(own)

    def forward(self, x):
        return self.fc(x)


class Numbered(Layer):
    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.number = self.made


def counted(form):
    calls = []

    def make():
        calls.append(1)
        return form(len(calls))

    return make


LOG: list[nn.Module] = []


def logged():
    layer = Layer(log=LOG)
    layer.fc.register_forward_hook(lambda module, args, output: output)
    LOG.append(layer)
    return layer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Numbered, r"\(Numbered\).number is \d+, then \d+"),
        (counted(lambda n: Layer(rate=1 / n)), r"\(Layer\).rate is 0.\d+, then"),
        (counted(Layer), r"fc \(Linear\).out_features is 3, then 4"),
        (counted(lambda n: Layer(options={"path": [0, n]})), r"\(Layer\).options is .*'3'.* then .*'4'"),
        (counted(lambda n: nn.Sequential(*map(Layer, [3] * n))), r"3.fc \(Linear\).in_features is None, then 3"),
        (counted(lambda n: nn.Dropout(n / 10)), r"\(Dropout\).p is 0.3, then 0.4"),
        (logged, ""),
        (lambda: Layer(rate=random.random(), noise=torch.rand(2), missing=float("nan")), ""),
        (lambda: nn.LazyLinear(3), ""),
    ],
)
def test_what_each_call_makes_otherwise_is_named(make, says):
    found = why_unlike(1, make, on_meta(make), build_block(make, 1, seed=3))
    assert re.search(says, found) if says else not found, found


def test_every_rank_refuses_what_one_builds_otherwise():
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=2)

    def rank(transport):
        blocks = [Layer, partial(Layer, rate=1.0), Layer, counted(lambda n: Layer(rate=n))]
        with pytest.raises(
            qs.MisfitError, match=r"block 3 \(Layer\): .* another block at each call: .*rate is 3, then 4"
        ):
            Engine(plan, blocks, nn.functional.mse_loss, torch.optim.SGD, transport=transport)

    run_local(2, rank)
