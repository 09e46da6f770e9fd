"""State that layers, code between them, or the loop change after the split: as in one process, or refused."""

import random

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import run_local, split
from quintsched.runtime.user_objects.changes_since_split import sources_of

from ...helpers import training
from ...helpers.blocks import of_kind
from .models import KINDS, WIDTH, Block, Walked, check, inputs, loss, made, nothing, require_chain, sgd


def given(self, x):
    x = x if self.flag else x + self.teacher(x)
    return x if self.last is None else x * self.last


UNFOLLOWED = {
    "last": lambda model: setattr(model, "last", torch.full((4,), 0.5, dtype=torch.float64)),
    "flag": lambda model: setattr(model, "flag", not model.flag),
    "teacher": lambda model: setattr(model, "teacher", nn.Identity()),
    "its hook": lambda model: model.register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNFOLLOWED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_cannot_follow_is_refused_in_the_next_step(name, kind):
    says = rf"{name},? is no longer what it was when the \w+ was split.*split the model again"
    with pytest.raises(qs.MisfitError, match=says):
        check(made(kind, given), UNFOLLOWED[name])


def test_another_order_of_layers_in_a_traced_row_is_refused():
    with pytest.raises(qs.MisfitError, match=r"is no longer what it was when the"):
        check(made(Walked, given), lambda model: model.layers.insert(0, model.layers.pop(1)), "dp=2", cut=split)


def drawing():
    """Return a layer that draws from its own generator, and counts in its class and outside; each has its own."""
    totals = {"calls": 0}

    class Drawing(nn.Linear):
        calls = 0

        def __init__(self):
            super().__init__(4, 4)
            self.random = random.Random(0)

        def forward(self, x):
            Drawing.calls += 1
            totals["calls"] += 1
            return super().forward(x) * self.random.random() / (Drawing.calls + totals["calls"])

    return Drawing()


def test_trial_runs_move_no_generator_and_no_counter():
    """Each rank, and one process, has objects of its own: threads would share a generator."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), drawing(), nn.Tanh(), nn.Linear(4, 2)).double()

    x, plan, own = inputs(), qs.compile("1f1b", mesh="pp=2", microbatches=2), [model() for _ in range(2)]
    batches = [(x, x[:, 0, 0])] * 2
    found = run_local(2, lambda one: training.train_rank(one, plan, own[one.rank], loss, sgd, batches, cut=split))
    expected = training.train_alone(model(), loss, sgd, batches, microbatches=2).losses
    assert [one.losses for one in found] == [pytest.approx(expected, rel=1e-12)] * 2


def with_shared_norm():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.Linear(4, 2)).double()


def with_teacher(kind, teacher):
    model = made(kind, lambda self, x: x + self.teacher(x))
    model.teacher = teacher
    return model.double()


@pytest.mark.parametrize("model", [with_shared_norm, lambda: with_teacher(Walked, nn.BatchNorm1d(3))])
def test_one_state_on_two_stages_is_refused_and_on_one_it_is_one(model):
    check(model(), mesh="pp=1", tolerance=1e-12)
    with pytest.raises(qs.MisfitError, match=r"which a forward changes, and are on stages 0 and 1.*copy.deepcopy"):
        check(model())


def first_halved(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return model


DROPS = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
FOLLOWED = {
    "the mode": (
        lambda kind: made(kind, lambda self, x: x * (2 if self.training else 3)),
        lambda model: model.train(not model.training),
    ),
    "hooks": (lambda kind: first_halved(made(kind, given)), nothing),
    "a dropout beside weights": (lambda kind: with_teacher(kind, DROPS), nothing),
    "what is done in place, though it does nothing yet": (
        lambda kind: made(kind, lambda self, x: x.mul_(self.tau)),
        lambda model: setattr(model, "tau", model.tau / 2),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FOLLOWED)
def test_what_a_loop_or_code_between_layers_changes_is_followed(what, kind):
    build, change = FOLLOWED[what]
    check(build(kind), change, "pp=1" if "in place" in what else "pp=2")


def test_a_frozen_module_in_a_container_is_followed():
    model = made(Walked, lambda self, x: x + self.outside[0](x))
    model.outside = [nn.Linear(4, 4).double().requires_grad_(False)]
    check(model, lambda model: model.outside[0].weight.data.mul_(0.5))


Doubling = of_kind(nn.Sequential, lambda self, x: nn.Sequential.forward(self, x) * 2)


@pytest.mark.parametrize("kind", [Doubling, nn.Sequential])
def test_a_row_with_a_forward_or_hooks_of_its_own_keeps_them(kind):
    model = first_halved(kind(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double())
    require_chain(split(model), model, inputs())


class OwnLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.tau, self.act = nn.Linear(WIDTH, WIDTH), 1.0, torch.tanh
        self.shift = torch.tensor(0.5)

    def forward(self, x):
        return x + self.act(self.fc(x)) * self.tau * (1 if self.training else 3) + self.shift


class WithOwnLayers(Walked):
    def make_layers(self):
        self.layers = nn.ModuleList([OwnLayer(), OwnLayer()])


class Tied(WithOwnLayers):
    def make_layers(self):
        super().make_layers()
        self.layers[1].fc.weight = self.layers[0].fc.weight


class Again(WithOwnLayers):
    def make_layers(self):
        super().make_layers()
        self.layers.append(self.layers[0])


CHANGES = {
    "a number": lambda layer: setattr(layer, "tau", layer.tau * 0.7),
    "its mode": lambda layer: layer.eval(),
    "a function": lambda layer: setattr(layer, "act", torch.relu),
    "a tensor": lambda layer: setattr(layer, "shift", layer.shift * 2),
}


@pytest.mark.parametrize("kind", [WithOwnLayers, Tied, Again])
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_set_in_a_layer_holds_in_its_block(what, kind):
    model, x = kind(), torch.randn(8, 3)
    blocks = split(model, example=x)
    for layer in [*model.layers][:2]:
        CHANGES[what](layer)
    for source in (*sources_of(blocks), *blocks.copies):
        source.follow_model()
    require_chain(blocks, model, x)


Other = of_kind(OwnLayer, lambda self, x: x)


@pytest.mark.parametrize(("name", "value"), [("__class__", Other), ("forward", torch.tanh)])
@pytest.mark.parametrize("kind", [WithOwnLayers, Tied])
def test_another_class_or_forward_of_a_layer_is_refused(kind, name, value):
    model = kind()
    found = split(model, example=torch.ones(2, 3))
    if kind is Tied:  # whose copies leave the model as it is
        assert found.tied
        assert model.layers[1].fc.weight is model.layers[0].fc.weight
        assert found[2].fc.weight is not found[1].fc.weight
    setattr(model.layers[1], name, value)
    with pytest.raises(qs.MisfitError, match=r"model\.layers\.1.* is no longer what it was when the model was split"):
        found.copies[0].follow_model()


def test_layers_that_are_called_twice_are_cut_over_tp():
    shared, x, plan = Block(), torch.ones(2, 4).double(), qs.compile("1f1b", mesh="tp=2", microbatches=1)
    model = nn.Sequential(nn.Linear(4, 4), shared, Block(), shared, nn.Linear(4, 2)).double()
    training.check_equality(plan, model, nn.functional.mse_loss, training.sgd, [(x, x[:, :2])] * 3)
