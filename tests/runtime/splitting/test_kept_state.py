"""State that code between layers, layers, or the loop change after the split: as in one process, or refused."""

from __future__ import annotations

import random
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import run_local, split

from ...helpers.training import train_alone, train_rank
from .models import KINDS, Block, Traced, Walked, check, inputs, loss, made, nothing, require_chain, sgd


def switched(self, x):
    return x * 2 if self.training else x * 3


def given(self, x):
    return x if self.last is None else x * self.last


def train_now_and_then(model):
    model.train(not model.training)


def give(model):
    model.last = torch.full((4,), 0.5, dtype=torch.float64)


def replace_module(model):
    model.teacher = nn.Identity()


def add_hook(model):
    model.register_forward_hook(lambda module, args, output: output * 2)


def in_place(self, x):
    return x.mul_(self.tau)


def halve(model):
    model.tau *= 0.5


class Centred(Walked):
    """The mean of inputs is kept between layers, without no_grad: inputs need no gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mu", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        x = self.stem(x)
        self.mu.mul_(0.9).add_(x.detach().requires_grad_().flatten(0, -2).mean(0), alpha=0.1)
        return self.head(self.layers[1](self.layers[0](x)))


def test_a_split_leaves_no_graph_on_a_buffer():
    model = Centred().double()
    split(model, example=inputs()[:2])
    assert model.mu.grad_fn is None
    assert not model.mu.any()


class Gated(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.ones((), dtype=torch.float64))


class OfGates(Walked):
    """Code between layers goes by a buffer that each layer has."""

    def make_layers(self):
        self.layers = nn.ModuleList([Gated(), Gated()])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x) * layer.gate
        return self.head(x)


def replace_gates(model):
    for number, layer in enumerate(model.layers):
        layer.gate = layer.gate * (0.5 + 0.1 * number)


def fill_gates(model):
    for layer in model.layers:
        layer.gate.mul_(0.5)


class Known(nn.Linear):
    """A layer that goes by which one it is."""

    active: ClassVar[set[nn.Module]] = set()

    def forward(self, x):
        return super().forward(x) * (2 if self in self.active else 1)


class InARow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Known(3, 3), Known(3, 3), Known(3, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_is_itself():
    model = InARow()
    x = torch.randn(4, 3)
    blocks = split(model, example=x)
    Known.active = {model.layers[1]}
    require_chain(blocks, model, x)


@pytest.mark.parametrize(("change", "name"), [(give, "last"), (replace_module, "teacher"), (add_hook, "its hook")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_cannot_follow_is_refused_in_the_next_step(kind, change, name):
    with pytest.raises(
        MisfitError, match=rf"{name},? is no longer what it was when the \w+ was split.*split the model"
    ):
        check(made(kind, given), change)


def taught(self, x):
    return x + self.teacher(x)


def first_halved(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


class Doubling(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def row(kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()


@pytest.mark.parametrize(("kind", "prepare"), [(Doubling, nothing), (nn.Sequential, first_halved)])
def test_a_row_with_a_forward_or_hooks_of_its_own_keeps_them(kind, prepare):
    model = row(kind)
    prepare(model)
    require_chain(split(model), model, inputs())


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


def stepped(model, mesh, cut=split):
    """Train on a mesh, and in one process, of which each has objects of its own; returns the losses of both."""
    plan, x = qs.compile("1f1b", mesh=mesh, microbatches=2), inputs()
    own, batches = [model() for _ in range(plan.mesh.size)], [(x, x[:, 0, 0])] * 2  # threads would share a generator

    def train(transport):
        return train_rank(transport, plan, own[transport.rank], loss, sgd, batches, cut=cut).losses

    found = run_local(plan.mesh.size, train)
    return found, train_alone(model(), loss, sgd, batches, microbatches=2).losses


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2"])
def test_trial_runs_move_no_generator_and_no_counter(mesh):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), drawing(), nn.Tanh(), nn.Linear(4, 2)).double()

    found, expected = stepped(model, mesh)
    assert found == [pytest.approx(expected, rel=1e-12)] * len(found)


class Counting(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", steps)

    def forward(self, x):
        self.steps += 1
        return self.fc(x) / self.steps.clone()


def with_shared_norm():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.Linear(4, 2)).double()


def with_shared_buffer():
    torch.manual_seed(0)
    steps = torch.zeros((), dtype=torch.float64)
    return nn.Sequential(nn.Linear(3, 4), Counting(steps), nn.Tanh(), Counting(steps), nn.Linear(4, 2)).double()


class Shared(nn.Module):
    """One norm between all of its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.norm = nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.head(x)


def walked(model):
    return split(model, example=inputs()[:2])


@pytest.mark.parametrize(
    ("model", "cut"),
    [(with_shared_norm, split), (with_shared_buffer, split), (lambda: Shared().double(), walked)],
)
def test_one_state_on_two_stages_is_refused_and_on_one_it_is_one(model, cut):
    (found,), expected = stepped(model, "pp=1", cut)
    assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(MisfitError, match=r"which a forward changes, and are on stages 0 and 1.*copy.deepcopy"):
        stepped(model, "pp=2", cut)


class TracedRow(Traced):
    """A list of layers, found by tracing; the class has a scale, which an instance may have as well."""

    scale = torch.ones((), dtype=torch.float64)

    def make_layers(self):
        self.layers = nn.ModuleList([Block(), Block()])
        if self.has_own:
            self.scale = torch.full((), 0.5, dtype=torch.float64)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.head(self.middle(x))


def with_scale(model):
    model.scale = torch.full((), 0.5, dtype=torch.float64)


def swap_layers(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def renew_layer(model):
    model.layers[1] = Block().double()


@pytest.mark.parametrize("change", [with_scale, swap_layers, renew_layer])
def test_another_layer_in_a_traced_row_or_tensor_before_that_of_a_class_is_refused(change):
    with pytest.raises(MisfitError, match="is no longer what it was when the"):
        check(row_with(False), change, "dp=2")


def by_a_module_in_a_list(self, x):
    return x + self.outside[0](x)


def scale_outside(model):
    with torch.no_grad():
        model.outside[0].weight.mul_(0.5)


def row_with(has_own):
    return made(type("TracedRow", (TracedRow,), {"has_own": has_own}), Traced.middle)


def shifted(self, x):
    return x + self.mean


def renew_mean(model):
    model.mean = model.mean + 0.5


def with_dropout(kind):
    model = made(kind, taught)
    model.teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).double()
    return model


def with_hook(kind):
    model = made(kind, given)
    first_halved(model)
    return model


def with_frozen_module_in_a_list():
    model = made(Walked, by_a_module_in_a_list)
    model.outside = [nn.Linear(4, 4).double().requires_grad_(False)]
    return model


FOLLOWED = {
    **{f"the mode, {kind.__name__}": (partial(made, kind, switched), train_now_and_then, "pp=2") for kind in KINDS},
    **{f"a dropout beside weights, {kind.__name__}": (partial(with_dropout, kind), nothing, "pp=2") for kind in KINDS},
    **{f"hooks of the model, {kind.__name__}": (partial(with_hook, kind), nothing, "pp=2") for kind in KINDS},
    "done in place, though it does nothing yet": (partial(made, Walked, in_place), halve, "pp=1"),
    "a buffer that is replaced, Traced": (partial(made, Traced, shifted), renew_mean, "pp=2"),
    "buffers that are replaced": (lambda: OfGates().double(), replace_gates, "pp=2"),
    "buffers that are replaced, on replicas": (lambda: OfGates().double(), replace_gates, "dp=2"),
    "buffers that are filled": (lambda: OfGates().double(), fill_gates, "pp=2"),
    "a tensor of an instance before that of its class": (partial(row_with, True), nothing, "dp=2"),
    "a frozen module in a container": (with_frozen_module_in_a_list, scale_outside, "pp=2"),
    "a frozen module in a container, on replicas": (with_frozen_module_in_a_list, scale_outside, "dp=2"),
}


@pytest.mark.parametrize(("build", "change", "mesh"), FOLLOWED.values(), ids=FOLLOWED)
def test_what_a_loop_or_code_between_layers_changes_is_followed(build, change, mesh):
    check(build(), change, mesh)
