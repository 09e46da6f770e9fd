"""Attributes that a loop sets in the layers of its model hold in the blocks; those set by layers reach the model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local, split

WIDTH = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.tau, self.act = nn.Linear(WIDTH, WIDTH), 1.0, torch.tanh
        self.shift = torch.tensor(0.5)

    def forward(self, x):
        return x + self.act(self.fc(x)) * self.tau * (1 if self.training else 3) + self.shift


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def anneal(layer):
    layer.tau *= 0.7


def switch(layer):
    layer.eval()


def exchange(layer):
    layer.act = torch.relu


def shift(layer):
    layer.shift = layer.shift * 2


def made():
    torch.manual_seed(0)
    return Model()


def loss(output, targets):
    return (output.sum(1) - targets).square().sum(), len(targets)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def trained(start, change, mesh, x):
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def work(transport):
        model = copy.deepcopy(start)
        engine = Engine(plan, split(model, example=x[:2]), loss, sgd, transport=transport)
        losses = []
        for _ in range(3):
            losses.append(float(engine.step(x, x[:, 0]).loss))
            for layer in model.layers:
                change(layer)
        return losses

    return run_local(plan.mesh.size, work)


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2"])
@pytest.mark.parametrize("change", [anneal, switch, exchange, shift])
def test_what_is_set_in_a_layer_holds_in_its_block(change, mesh):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    start, expected = made(), []
    model = copy.deepcopy(start)
    optimizer = sgd(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        total = loss(model(x), x[:, 0])[0] / len(x)
        total.backward()
        optimizer.step()
        expected.append(total.item())
        for layer in model.layers:
            change(layer)
    for losses in trained(start, change, mesh, x):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_what_a_block_sets_is_in_the_layer():
    model = made()
    block = split(model, example=torch.ones(2, 3))[1]
    block.seen = "by the block"
    assert model.layers[0].seen == "by the block"
    assert block.fc is model.layers[0].fc


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.layers[1].fc.weight = self.layers[0].fc.weight


def test_copies_of_shared_weights_leave_the_model_as_it_is():
    model = Tied()
    found = split(model, example=torch.ones(2, 3))
    assert found.tied
    assert model.layers[1].fc.weight is model.layers[0].fc.weight
    assert found[2].fc.weight is not found[1].fc.weight


class Other(Layer):
    def forward(self, x):
        return x


@pytest.mark.parametrize(("name", "value"), [("__class__", Other), ("forward", torch.tanh)])
@pytest.mark.parametrize("kind", [Model, Tied])
def test_another_class_or_forward_of_a_layer_is_refused(kind, name, value):
    model = kind()
    found = split(model, example=torch.ones(2, 3))
    setattr(model.layers[1], name, value)
    with pytest.raises(MisfitError, match=r"model\.layers\.1.* is no longer what it was when the model was split"):
        found.copies[0].follow_model()


class Twice(Model):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            weight_norm(layer.fc)

    def forward(self, x):
        x = self.stem(x)
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return self.head(x)


def test_a_parametrized_layer_may_be_called_twice():
    model, x = Twice().double(), torch.ones(2, 3, dtype=torch.float64)
    found = split(model, example=x)
    assert len(found.tied) == 3
    expected = model(x)
    for block in found:
        x = block(x)
    assert torch.allclose(x, expected)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(3, WIDTH + 1)

    def forward(self, x):
        return self.a(x), self.b(x)


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, 2), nn.Linear(WIDTH + 1, 2)

    def forward(self, pair):
        return self.f(pair[0]) + self.g(pair[1])


def test_a_layer_may_multiply_each_tensor_of_what_the_one_before_gives():
    model = nn.Sequential(Pair(), Join())
    first, second = split(model, blocks=["0", "1"], example=torch.ones(2, 3))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    left = first(x)
    assert torch.equal(second(left.output, **left.riders), model(x))


def test_a_model_with_lazy_layers_is_refused():
    with pytest.raises(
        MisfitError, match=r"the model \(Sequential\): '1\.weight' has no shape before the first forward"
    ):
        split(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)), example=torch.ones(2, 3))
