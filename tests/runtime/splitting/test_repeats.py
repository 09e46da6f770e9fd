"""Layers that a model uses more than once: each use is a block, and their weights stay one."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, split

from ...helpers.training import check_equality
from .models import WIDTH, Block, Walked, check, inputs, loss, sgd


class Row(Walked):
    """Layers a, b, a, b between two others."""

    kind = Block

    def make_layers(self):
        one, other = self.kind(), self.kind()
        self.layers = nn.ModuleList([one, other, one, other])


class Loop(Walked):
    """The same layers again and again."""

    def forward(self, x):
        x = self.stem(x)
        for layer in [*self.layers] * 2:
            x = layer(x)
        return self.head(x)


def sequential():
    one, other, act = Block(), Block(), nn.Tanh()
    return nn.Sequential(nn.Linear(3, WIDTH), one, act, other, act, one, other)


class KeepsItsMethod(Block):
    def __init__(self):
        super().__init__()
        self.run = self.add

    def add(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.run(x)


class OwnMethods(Row):
    """Layers that keep a bound method: of a copy it is the copy's."""

    kind = KeepsItsMethod


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
@pytest.mark.parametrize(
    ("kind", "example"), [(Row, True), (Row, False), (Loop, True), (sequential, False), (OwnMethods, True)]
)
def test_layers_that_come_again_stay_one(kind, example, mesh):
    model, cut = kind().double(), partial(split, example=inputs()[:2]) if example else split
    blocks = cut(copy.deepcopy(model))
    assert len(blocks) == (7 if kind is sequential else 6)
    assert sorted(map(len, blocks.tied.values())) == [2] * 8
    count = len(list(model.parameters()))
    check(model, mesh=mesh, cut=cut)
    assert len(list(model.parameters())) == count


def freeze(model, is_trained=False):
    model.layers[0].requires_grad_(is_trained)


def shrink(model):
    freeze(model, is_trained=True)
    with torch.no_grad():
        model.layers[2].fc1.weight.mul_(0.5)


def rebind(model):
    model.layers[2].fc1.weight.data = model.layers[0].fc1.weight.data * 0.5


def load(model):
    model.load_state_dict({name: held * 0.9 for name, held in model.state_dict().items()})


def test_copies_follow_what_a_loop_does_to_weights():
    model, x, plan = Row().double(), inputs(), qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2)
    does, batches = [freeze, shrink, rebind, load], [(x, x[:, 0, 0])] * 4
    how = {"before": lambda model, step: does[step](model), "cut": partial(split, example=x[:2])}
    check_equality(plan, model, loss, sgd, batches, **how)
    does = [load, lambda model: model.layers[0].fc1.weight.register_hook(lambda grad: grad * 0.1)]
    with pytest.raises(qs.MisfitError, match=r"fc1\.weight has a hook, and is a weight of several stages"):
        check_equality(plan, model, loss, sgd, batches, **how)


class AsksWhatTrains(Row):
    def forward(self, x):
        count = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return super().forward(x) * (1 + count / 1000)


@pytest.mark.parametrize("kind", [Row, AsksWhatTrains])
def test_code_between_layers_that_asks_what_is_trained_is_split_again(kind):
    model, x, plan = kind().double(), inputs(), qs.compile("gpipe", mesh="dp=1", microbatches=2)
    engine = Engine(plan, split(model, example=x[:2]), loss, sgd)
    engine.step(x, x[:, 0, 0])
    model.layers[1].fc1.requires_grad_(False)
    said = r"model\.layers\.1\.fc1\.weight\.requires_grad is no longer .*split the model"
    with nullcontext() if kind is Row else pytest.raises(qs.MisfitError, match=said):
        engine.step(x, x[:, 0, 0])
