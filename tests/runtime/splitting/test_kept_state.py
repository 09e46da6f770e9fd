"""State that code between layers, layers, or the loop change after the split: as in one process, or refused."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine, run_local, split

from .test_modes_and_state import Block, Traced, Walked, inputs, loss, made, nothing, sgd, trained


def switched(self, x):
    return x * 2 if self.training else x * 3


def given(self, x):
    return x if self.last is None else x * self.last


def activated(self, x):
    return torch.tanh(self.options["act"](x)) if "act" in self.options else x


def train_now_and_then(model):
    model.train(not model.training)


def give(model):
    model.last = torch.full((4,), 0.5, dtype=torch.float64)


def replace_module(model):
    model.teacher = nn.Identity()


def add_hook(model):
    model.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("kind", [Traced, Walked])
def test_code_between_layers_trains_as_the_loop_says(kind):
    found, expected = trained(made(kind, switched), train_now_and_then, "pp=2")
    assert found == [pytest.approx(expected, rel=1e-10)] * 2


def in_place(self, x):
    return x.mul_(self.tau)


def halve(model):
    model.tau *= 0.5


def test_what_code_between_layers_does_in_place_counts_though_it_does_nothing_yet():
    found, expected = trained(made(Walked, in_place), halve, "pp=1")
    assert found == [pytest.approx(expected, rel=1e-10)]


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


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2", "dp=2"])
@pytest.mark.parametrize("change", [replace_gates, fill_gates])
def test_buffers_of_layers_that_the_loop_replaces_are_followed(change, mesh):
    found, expected = trained(OfGates().double(), change, mesh)
    assert found == [pytest.approx(expected, rel=1e-10)] * len(found)


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
    given = x
    with torch.no_grad():
        for block in blocks:
            given = block(given)
        assert torch.equal(given, model(x))


@pytest.mark.parametrize(("change", "name"), [(give, "last"), (replace_module, "teacher"), (add_hook, "its hook")])
@pytest.mark.parametrize("kind", [Traced, Walked])
def test_what_blocks_cannot_follow_is_refused_in_the_next_step(kind, change, name):
    with pytest.raises(
        MisfitError, match=rf"{name},? is no longer what it was when the \w+ was split.*split the model"
    ):
        trained(made(kind, given), change, "pp=2")


def taught(self, x):
    return x + self.teacher(x)


@pytest.mark.parametrize("kind", [Traced, Walked])
def test_a_dropout_beside_weights_between_layers_may_be_keyed(kind):
    model = made(kind, taught)
    model.teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).double()
    found, expected = trained(model, nothing, "pp=2")
    assert found == [pytest.approx(expected, rel=1e-10)] * 2


def in_a_list(self, x):
    self.options["seen"][0].add_(1)
    return x


def past_setattr(self, x):
    self.__dict__["count"] = self.count + 1
    return x


def of_the_class(self, x):
    type(self).tally = getattr(type(self), "tally", 0) + 1
    return x


def as_evaluated(self, x):
    if not self.training:
        type(self).tally = getattr(type(self), "tally", 0) + 1
    return x


def on_a_layer_of_torch(self, x):
    self.head.seen = getattr(self.head, "seen", 0) + 1
    return x


def a_weight(self, x):
    with torch.no_grad():
        self.head.weight.mul_(0.9)
    return x


def a_weights_data(self, x):
    self.head.weight.data = self.head.weight.data * 0.9
    return x


def a_new_buffer(self, x):
    self.register_buffer("late", x.detach().mean())
    return x


def looking(self, x):
    assert bool(torch.isfinite(x).all())
    return x


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (in_a_list, r"options\['seen'\]\[0\]"),
        (past_setattr, "count"),
        (of_the_class, "tally"),
        (as_evaluated, "tally"),
        (on_a_layer_of_torch, "seen"),
        (a_weight, "head.weight"),
        (a_weights_data, "head.weight"),
        (a_new_buffer, "late"),
        (looking, r"numbers between its layers are unknown \(AssertionError.*test_kept_state.py:\d+\)"),
    ],
)
def test_what_code_between_layers_changes_is_refused_however_it_does(middle, says):
    model = made(Walked, middle)
    model.options["seen"] = [torch.zeros(())]
    with pytest.raises((MisfitError, UsageError), match=says):
        split(model, example=inputs()[:2])


@pytest.mark.parametrize("middle", [in_a_list, past_setattr, of_the_class])
def test_the_same_of_a_forward_that_is_traced(middle):
    model = made(Traced, middle)
    model.options["seen"] = [torch.zeros(())]
    with pytest.raises((MisfitError, UsageError), match=r"the forward changes .*which no other rank would see"):
        split(model, example=inputs()[:2])


@pytest.mark.parametrize("middle", [a_weight, a_weights_data])
def test_a_traced_forward_changes_no_weight(middle):
    with pytest.raises(UsageError, match=r"changes the weight 'head.weight'|sets .data of a tensor"):
        split(made(Traced, middle))


def first_halved(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


@pytest.mark.parametrize("kind", [Traced, Walked])
def test_hooks_of_the_model_run_with_what_they_expect(kind):
    model = made(kind, given)
    first_halved(model)
    found, expected = trained(model, nothing, "pp=2")
    assert found == [pytest.approx(expected, rel=1e-10)] * 2


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
    x = inputs()
    expected = model(x)
    for block in split(model):
        x = block(x)
    assert torch.equal(x, expected)


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


def stepped(model, mesh, blocks=None, steps=2):
    """Return the losses of a few steps."""
    plan, x = qs.compile("1f1b", mesh=mesh, microbatches=2), inputs()
    models = [model() for _ in range(plan.mesh.size)]  # ranks are threads, which would share torch's generator

    def work(transport):
        own = models[transport.rank]
        engine = Engine(plan, split(own) if blocks is None else blocks(own), loss, sgd, transport=transport)
        return [engine.step(x, x[:, 0, 0]).loss.item() for _ in range(steps)]

    return run_local(plan.mesh.size, work)


def in_one_process(model, steps=2):
    model, x, losses = model(), inputs(), []
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        totals = [loss(model(piece), piece[:, 0, 0])[0] / 8 for piece in x.split(4)]
        sum(totals).backward()
        optimizer.step()
        losses.append(sum(totals).item())
    return losses


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2"])
def test_trial_runs_move_no_generator_and_no_counter(mesh):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), drawing(), nn.Tanh(), nn.Linear(4, 2)).double()

    expected = in_one_process(model)
    assert stepped(model, mesh) == [pytest.approx(expected, rel=1e-12)] * (2 if mesh == "pp=2" else 1)


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
    ("model", "blocks"),
    [(with_shared_norm, None), (with_shared_buffer, None), (lambda: Shared().double(), walked)],
)
def test_one_state_on_two_stages_is_refused_and_on_one_it_is_one(model, blocks):
    assert stepped(model, "pp=1", blocks) == [pytest.approx(in_one_process(model), rel=1e-12)]
    with pytest.raises(MisfitError, match=r"which a forward changes, and are on stages 0 and 1.*copy.deepcopy"):
        stepped(model, "pp=2", blocks)


class Scaled(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.fc, self.tau = nn.Linear(4, 4), 1.0
        self.fc.weight = self.fc.weight if weight is None else weight

    def forward(self, x):
        return (self.fc(x) * self.tau).tanh()


def test_copies_around_shared_weights_follow_the_models_own_modules():
    model = nn.Sequential(nn.Linear(3, 4), first := Scaled(), first, Scaled(first.fc.weight), nn.Linear(4, 2))
    blocks, x = split(model), inputs().float()
    first.tau, model[3].fc.tau = 0.5, 2.0
    for source in chain(blocks.copies):
        source.follow_model()
    expected = model(x)
    for block in blocks:
        x = block(x)
    assert torch.equal(x, expected)
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
    blocks, x = split(model), inputs().float()
    change(model)
    blocks[0]._origin.follow_model()
    expected = model(x)
    for block in blocks:
        x = block(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("change", ["config", "descriptor", "module"])
def test_what_code_of_a_trace_leads_to_is_followed(change):
    settings = ModuleType("settings_of_a_user")
    settings.rate = 1.0
    model = delegating(settings)
    blocks, x = split(model), inputs().float()
    if change == "descriptor":
        model.scheduled = 0.5
    else:
        (settings if change == "module" else model.config).rate = 0.5
    blocks[0]._origin.follow_model()
    expected = model(x)
    for block in blocks:
        x = block(x)
    assert torch.equal(x, expected)


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


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_a_tensor_of_an_instance_comes_before_that_of_its_class(mesh):
    found, expected = trained(made(type("Own", (TracedRow,), {"has_own": True}), unchanged), lambda model: None, mesh)
    assert found == [pytest.approx(expected, rel=1e-10)] * 2


@pytest.mark.parametrize("change", [with_scale, swap_layers, renew_layer])
def test_another_layer_in_a_traced_row_or_tensor_before_that_of_a_class_is_refused(change):
    with pytest.raises(MisfitError, match="is no longer what it was when the"):
        trained(made(type("Bare", (TracedRow,), {"has_own": False}), unchanged), change, "dp=2")


def unchanged(self, x):
    return x


def by_a_module_in_a_list(self, x):
    return x + self.outside[0](x)


def scale_outside(model):
    with torch.no_grad():
        model.outside[0].weight.mul_(0.5)


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2", "dp=2"])
def test_a_frozen_module_in_a_container_is_the_models_own(mesh):
    model = made(Walked, by_a_module_in_a_list)
    model.outside = [nn.Linear(4, 4).double().requires_grad_(False)]
    found, expected = trained(model, scale_outside, mesh)
    assert found == [pytest.approx(expected, rel=1e-10)] * len(found)
