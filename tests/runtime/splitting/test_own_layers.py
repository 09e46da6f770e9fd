"""Attributes that a loop sets in the layers of its model hold in the blocks; those set by layers reach the model."""

from collections import OrderedDict
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import split
from quintsched.runtime.user_objects.changes_since_split import sources_of

from ...helpers.training import check_equality, sgd
from .models import WIDTH, Block, Traced, Walked, require_chain


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.tau, self.act = nn.Linear(WIDTH, WIDTH), 1.0, torch.tanh
        self.shift = torch.tensor(0.5)

    def forward(self, x):
        return x + self.act(self.fc(x)) * self.tau * (1 if self.training else 3) + self.shift


class Model(Walked):
    def make_layers(self):
        self.layers = nn.ModuleList([Layer(), Layer()])


CHANGES = {
    "a number": lambda layer: setattr(layer, "tau", layer.tau * 0.7),
    "its mode": lambda layer: layer.eval(),
    "a function": lambda layer: setattr(layer, "act", torch.relu),
    "a tensor": lambda layer: setattr(layer, "shift", layer.shift * 2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_set_in_a_layer_holds_in_its_block(what):
    model, x = Model(), torch.randn(8, 3)
    blocks = split(model, example=x)
    for layer in model.layers:
        CHANGES[what](layer)
    follow(blocks)
    require_chain(blocks, model, x)


def follow(blocks):
    for source in (*sources_of(blocks), *blocks.copies):
        source.follow_model()


class Tied(Model):
    def make_layers(self):
        super().make_layers()
        self.layers[1].fc.weight = self.layers[0].fc.weight


class Other(Layer):
    def forward(self, x):
        return x


@pytest.mark.parametrize(("name", "value"), [("__class__", Other), ("forward", torch.tanh)])
@pytest.mark.parametrize("kind", [Model, Tied])
def test_another_class_or_forward_of_a_layer_is_refused(kind, name, value):
    model = kind()
    found = split(model, example=torch.ones(2, 3))
    if kind is Tied:  # whose copies leave the model as it is
        assert found.tied
        assert model.layers[1].fc.weight is model.layers[0].fc.weight
        assert found[2].fc.weight is not found[1].fc.weight
    setattr(model.layers[1], name, value)
    with pytest.raises(MisfitError, match=r"model\.layers\.1.* is no longer what it was when the model was split"):
        found.copies[0].follow_model()


def test_layers_that_are_called_twice_are_cut_over_tp():
    shared, x, plan = Block(), torch.ones(2, 4).double(), qs.compile("1f1b", mesh="tp=2", microbatches=1)
    model = nn.Sequential(nn.Linear(4, 4), shared, Block(), shared, nn.Linear(4, 2)).double()
    check_equality(plan, model, nn.functional.mse_loss, sgd, [(x, x[:, :2])] * 3)


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
    follow(blocks)
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


class Whole:
    factor = 1.0


class Half:
    factor = 0.5


class Rate(float):
    factor = 1.0


SETTINGS = ModuleType("settings_of_a_user")


class Held(Traced):
    """Code between its layers goes by many kinds of objects."""

    scheduled = Scheduled()

    def __init__(self):
        super().__init__()
        self.number, self.table, self.whole, self.config = Rate(1.0), OrderedDict(), Whole(), SimpleNamespace(rate=1.0)

    def __getattr__(self, name):
        return self.__dict__["config"].rate if name == "rate" else super().__getattr__(name)

    def middle(self, x):
        factor = self.number.factor * getattr(self.table, "factor", 1.0) * self.whole.factor
        x = x * factor * self.rate * self.scheduled * SETTINGS.rate
        return x * (0.5 if any(name.startswith("late_") for name in vars(self)) else 1.0)


OBJECTS = {
    "an attribute of a number": lambda model: setattr(model.number, "factor", 0.5),
    "an attribute of a dict": lambda model: setattr(model.table, "factor", 0.5),
    "a class": lambda model: setattr(model.whole, "__class__", Half),
    "a name": lambda model: setattr(model, "late_name", 1),
    "what __getattr__ asks": lambda model: setattr(model.config, "rate", 0.5),
    "a descriptor": lambda model: setattr(model, "scheduled", 0.5),
    "a module": lambda model: setattr(SETTINGS, "rate", 0.5),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_what_code_of_a_trace_leads_to_is_followed(what):
    SETTINGS.rate, Held.scheduled = 1.0, Scheduled()
    model = Held()
    blocks, x = split(model), torch.randn(8, 3)
    OBJECTS[what](model)
    follow(blocks)
    require_chain(blocks, model, x)
