"""State that code between layers, layers, or the loop change after the split: as in one process, or refused."""

from __future__ import annotations

import random
from functools import partial

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


def taught(self, x):
    return x + self.teacher(x)


def in_place(self, x):
    return x.mul_(self.tau)


def by_a_module_in_a_list(self, x):
    return x + self.outside[0](x)


def train_now_and_then(model):
    model.train(not model.training)


def give(model):
    model.last = torch.full((4,), 0.5, dtype=torch.float64)


def replace_module(model):
    model.teacher = nn.Identity()


def add_hook(model):
    model.register_forward_hook(lambda module, args, output: output * 2)


def halve(model):
    model.tau *= 0.5


def first_halved(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return model


@pytest.mark.parametrize(("change", "name"), [(give, "last"), (replace_module, "teacher"), (add_hook, "its hook")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_cannot_follow_is_refused_in_the_next_step(kind, change, name):
    with pytest.raises(
        MisfitError, match=rf"{name},? is no longer what it was when the \w+ was split.*split the model"
    ):
        check(made(kind, given), change)


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


def test_trial_runs_move_no_generator_and_no_counter():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), drawing(), nn.Tanh(), nn.Linear(4, 2)).double()

    found, expected = stepped(model, "pp=2")
    assert found == [pytest.approx(expected, rel=1e-12)] * len(found)


def with_shared_norm():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.Linear(4, 2)).double()


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


@pytest.mark.parametrize(
    ("model", "cut"),
    [(with_shared_norm, split), (lambda: Shared().double(), partial(split, example=inputs()[:2]))],
)
def test_one_state_on_two_stages_is_refused_and_on_one_it_is_one(model, cut):
    (found,), expected = stepped(model, "pp=1", cut)
    assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(MisfitError, match=r"which a forward changes, and are on stages 0 and 1.*copy.deepcopy"):
        stepped(model, "pp=2", cut)


def scale_outside(model):
    with torch.no_grad():
        model.outside[0].weight.mul_(0.5)


def with_dropout(kind):
    model = made(kind, taught)
    model.teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).double()
    return model


def with_frozen_module_in_a_list():
    model = made(Walked, by_a_module_in_a_list)
    model.outside = [nn.Linear(4, 4).double().requires_grad_(False)]
    return model


FOLLOWED = {
    **{f"the mode, {kind.__name__}": (partial(made, kind, switched), train_now_and_then, "pp=2") for kind in KINDS},
    **{f"a dropout beside weights, {kind.__name__}": (partial(with_dropout, kind), nothing, "pp=2") for kind in KINDS},
    **{f"hooks, {kind.__name__}": (lambda k=kind: first_halved(made(k, given)), nothing, "pp=2") for kind in KINDS},
    "done in place, though it does nothing yet": (partial(made, Walked, in_place), halve, "pp=1"),
    "a frozen module in a container": (with_frozen_module_in_a_list, scale_outside, "pp=2"),
}


@pytest.mark.parametrize(("build", "change", "mesh"), FOLLOWED.values(), ids=FOLLOWED)
def test_what_a_loop_or_code_between_layers_changes_is_followed(build, change, mesh):
    check(build(), change, mesh)


class TracedRow(Traced):
    """A list of layers, found by tracing."""

    def make_layers(self):
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.middle(x))


def swap_layers(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def renew_layer(model):
    model.layers[1] = Block().double()


@pytest.mark.parametrize("change", [swap_layers, renew_layer])
def test_another_layer_in_a_traced_row_is_refused(change):
    with pytest.raises(MisfitError, match="is no longer what it was when the"):
        check(made(TracedRow, Traced.middle), change, "dp=2")


class Doubling(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", [Doubling, nn.Sequential])
def test_a_row_with_a_forward_or_hooks_of_its_own_keeps_them(kind):
    model = first_halved(kind(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double())
    require_chain(split(model), model, inputs())
