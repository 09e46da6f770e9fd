"""Attributes that a loop sets in the layers of its model hold in the blocks; those set by layers reach the model."""

from collections import OrderedDict
from copy import deepcopy
from itertools import chain
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local, split
from quintsched.runtime.parallel.cut_proofs.block_kinds import content_of
from quintsched.runtime.splitting.split_proof import chain as run_chain

from .models import Traced, check, inputs, require_chain

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


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2"])
@pytest.mark.parametrize("change", [anneal, switch, exchange, shift])
def test_what_is_set_in_a_layer_holds_in_its_block(change, mesh):
    def change_all(model):
        for layer in model.layers:
            change(layer)

    check(made().double(), change_all, mesh, cut=lambda own: split(own, example=inputs()[:2]))


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
    assert torch.allclose(run_chain(found, x), model(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


def test_layers_that_are_called_twice_are_cut_over_tp():
    torch.manual_seed(0)
    shared, x = Mlp(), torch.ones(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), shared, Mlp(), shared, nn.Linear(4, 2)).double()

    def train(transport):
        blocks = split(deepcopy(model), example=x.double())
        plan = qs.compile("1f1b", mesh=f"tp={transport.world_size}", microbatches=1)
        engine = Engine(plan, blocks, nn.functional.mse_loss, torch.optim.SGD, transport=transport)
        return [float(engine.step(x.double(), torch.zeros(2, 2).double()).loss) for _ in range(3)]

    assert run_local(2, train)[0] == pytest.approx(run_local(1, train)[0], rel=1e-12)


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


class Scaled(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.fc, self.tau = nn.Linear(4, 4), 1.0
        self.fc.weight = self.fc.weight if weight is None else weight

    def forward(self, x):
        return (self.fc(x) * self.tau).tanh()


def test_copies_around_shared_weights_follow_the_models_own_modules():
    model = nn.Sequential(nn.Linear(3, 4), first := Scaled(), first, Scaled(first.fc.weight), nn.Linear(4, 2))
    blocks, x = split(model), torch.randn(8, 3)
    first.tau, model[3].fc.tau = 0.5, 2.0
    for source in chain(blocks.copies):
        source.follow_model()
    require_chain(blocks, model, x)
    assert blocks[3].fc.tau == 2.0
    model[1] = nn.Identity()
    with pytest.raises(MisfitError, match=r"model\.1 is no longer what it was"):
        blocks.copies[0].follow_model()


class Scheduled:
    """A descriptor that keeps the value itself."""

    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind):
        return self.values.get("now", 1.0)

    def __set__(self, owner, value):
        self.values["now"] = value


def delegating(settings):
    class Delegating(Traced):
        scheduled = Scheduled()

        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(rate=1.0)

        def __getattr__(self, name):
            return self.__dict__["config"].rate if name == "rate" else super().__getattr__(name)

        def middle(self, x):
            return x * self.rate * self.scheduled * settings.rate

    return Delegating()


class Rate(float):
    factor = 1.0


class Half:
    factor = 0.5


class Whole:
    factor = 1.0


class Held(Traced):
    def __init__(self):
        super().__init__()
        self.rate, self.table, self.whole = Rate(1.0), OrderedDict(), Whole()

    def middle(self, x):
        factor = self.rate.factor * getattr(self.table, "factor", 1.0) * self.whole.factor
        return x * factor * (0.5 if any(name.startswith("late_") for name in vars(self)) else 1.0)


CHANGES = {
    "of a number": lambda model: setattr(model.rate, "factor", 0.5),
    "of a dict": lambda model: setattr(model.table, "factor", 0.5),
    "its class": lambda model: setattr(model.whole, "__class__", Half),
    "a name": lambda model: setattr(model, "late_name", 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_an_object_is_and_has_is_followed(change):
    model = Held()
    blocks, x = split(model), torch.randn(8, 3)
    change(model)
    blocks[0]._origin.follow_model()
    require_chain(blocks, model, x)


@pytest.mark.parametrize("change", ["config", "descriptor", "module"])
def test_what_code_of_a_trace_leads_to_is_followed(change):
    settings = ModuleType("settings_of_a_user")
    settings.rate = 1.0
    model = delegating(settings)
    blocks, x = split(model), torch.randn(8, 3)
    if change == "descriptor":
        model.scheduled = 0.5
    else:
        (settings if change == "module" else model.config).rate = 0.5
    blocks[0]._origin.follow_model()
    require_chain(blocks, model, x)


def test_equal_layers_are_one_kind_whose_cuts_are_proved_once():
    blocks = list(split(made().double(), example=inputs()[:2]))
    contents = [content_of(block)[0] for block in blocks]
    assert contents[1] == contents[2] != contents[0]
    blocks[2].tau = torch.ones(())
    assert content_of(blocks[2])[0] != contents[2]
