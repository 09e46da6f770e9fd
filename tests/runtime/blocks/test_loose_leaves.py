"""A tensor that collects a gradient and is no parameter is refused, wherever code goes by it; trials leave none."""

import itertools

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local, split
from quintsched.runtime.blocks.without_side_effects import untouched


class Layer(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.fc, self.held = nn.Linear(4, 4), {"delta": delta}

    def forward(self, x):
        return self.fc(x + self.held["delta"])


class Model(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.layers, self.delta = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), delta

    def forward(self, x):
        x = x + self.delta
        for layer in self.layers:
            x = layer(x)
        return x


def loose():
    return torch.zeros(4, requires_grad=True)


def mse(output, targets):
    return (output - targets).square().mean()


def engine_of(blocks, loss=mse):
    def work(transport):
        x = torch.ones(2, 4)
        sgd = torch.optim.SGD
        Engine(qs.compile("1f1b", mesh="pp=2", microbatches=2), blocks, loss, sgd, transport=transport).step(x, x)

    return run_local(2, work)


def test_a_loose_leaf_of_a_block_a_model_or_a_loss_is_refused():
    with pytest.raises(MisfitError, match=r"block 0 \(Layer\) goes by .*held\['delta'\].*nn.Parameter"):
        engine_of([Layer(loose()), nn.Linear(4, 4)])
    with pytest.raises(MisfitError, match=r"model \(Model\).delta, a tensor with requires_grad"):
        split(Model(loose()), example=torch.ones(2, 4))
    delta = loose()
    with pytest.raises(MisfitError, match="loss_fn goes by"):
        engine_of([nn.Linear(4, 4), nn.Linear(4, 4)], lambda output, targets: mse(output, targets) + delta.sum())


def test_a_trial_leaves_no_gradient():
    layer = Layer(loose())
    layer.fc.bias.grad = kept = torch.ones(4)
    with untouched(layer):
        layer(torch.ones(2, 4)).sum().backward()
    assert layer.fc.weight.grad is None
    assert layer.held["delta"].grad is None
    assert layer.fc.bias.grad is kept
    assert kept.tolist() == [1, 1, 1, 1]


class Cycled(Layer):
    def forward(self, x):
        return self.fc(x * next(self.held["delta"]))


@pytest.mark.parametrize("held", [itertools.cycle([1.0, 2.0]), iter([1.0] * 100), itertools.count(1)])
def test_an_iterator_that_a_block_holds_is_refused(held):
    with pytest.raises(MisfitError, match=r"block 0 \(Cycled\) goes by .*held\['delta'\], a .*keep the items"):
        engine_of([Cycled(held), nn.Linear(4, 4)])
    with pytest.raises(MisfitError, match=r"loss_fn goes by .*held.*, a .*keep the items"):
        engine_of([nn.Linear(4, 4), nn.Linear(4, 4)], lambda output, targets: mse(output, targets) * next(held))
