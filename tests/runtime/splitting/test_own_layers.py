"""Attributes that a loop sets in the layers of its model hold in the blocks; those set by layers reach the model."""

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import split
from quintsched.runtime.user_objects.changes_since_split import sources_of

from ...helpers.training import check_equality, sgd
from .models import WIDTH, Block, Walked, require_chain


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


class Tied(Model):
    def make_layers(self):
        super().make_layers()
        self.layers[1].fc.weight = self.layers[0].fc.weight


class Again(Model):
    def make_layers(self):
        super().make_layers()
        self.layers.append(self.layers[0])


CHANGES = {
    "a number": lambda layer: setattr(layer, "tau", layer.tau * 0.7),
    "its mode": lambda layer: layer.eval(),
    "a function": lambda layer: setattr(layer, "act", torch.relu),
    "a tensor": lambda layer: setattr(layer, "shift", layer.shift * 2),
}


@pytest.mark.parametrize("kind", [Model, Tied, Again])
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_set_in_a_layer_holds_in_its_block(what, kind):
    model, x = kind(), torch.randn(8, 3)
    blocks = split(model, example=x)
    for layer in [*model.layers][:2]:
        CHANGES[what](layer)
    for source in (*sources_of(blocks), *blocks.copies):
        source.follow_model()
    require_chain(blocks, model, x)


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
