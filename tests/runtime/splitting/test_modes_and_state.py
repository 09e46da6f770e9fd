"""Forwards that switch modes, and read or write what the model keeps, train as in one piece, or are refused."""

import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import split

from ...helpers.blocks import of_kind
from ...helpers.training import run_engines
from .models import KINDS, Block, Traced, Walked, check, inputs, loss, made, nothing, sgd


def all_modes(self, x):
    with torch.no_grad():
        taught = self.teacher(x)
        with torch.set_grad_enabled(self.training):
            x = x * 1.5 + taught
    with torch.inference_mode():
        told = self.teacher(x.detach())
    return x + told.clone()


def in_place(self, x):
    y = x.clone()
    y[..., 0] = 0.5
    y[:, 1:] += x[:, :1]
    return y


def caching(self, x):
    self.last = torch.ones(x.shape[-1], dtype=x.dtype) if self.last is None else self.last
    return x * self.last


def set_attributes(model):
    model.tau *= 0.7
    model.options["tau"] = 0.5
    model.head.scale = getattr(model.head, "scale", 1.0) * 0.5


CASES = {
    "modes": (all_modes, nothing),
    "in place": (in_place, nothing),
    "attributes": (
        lambda self, x: x * self.tau * self.options["tau"] * getattr(self.head, "scale", 1.0),
        set_attributes,
    ),
    "a buffer": (lambda self, x: x + self.mean, lambda model: model.mean.data.add_(0.5)),
    "another buffer": (lambda self, x: x + self.mean, lambda model: setattr(model, "mean", model.mean + 0.5)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("middle", "change"), CASES.values(), ids=CASES)
def test_modes_and_what_is_read_are_the_models_own(kind, middle, change, mesh):
    check(made(kind, middle), change, mesh)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Traced])
def test_what_a_forward_caches_is_its_own(kind):
    check(made(kind, caching), nothing, "pp=2")


def doing(change):
    """Return code between layers that changes something of the model, called with it and x."""
    return lambda self, x: (change(self, x), x)[1]


def set_count(self, x):
    self.count += 1
    return x * self.count


def on_a_layer(self, x):
    self.head.calls = getattr(self.head, "calls", 0) + 1
    return x


def count_in_class(self, x):
    type(self).tally = getattr(type(self), "tally", 0) + 1


def rebind(self, x):
    self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
    return x - self.mean


def a_weight(self, x):
    with torch.no_grad():
        self.head.weight.mul_(0.9)
    return x


def looking(self, x):
    assert bool(torch.isfinite(x).all())
    return x


TRACED = r"the forward changes .*which no other rank would see"
OF_TRACE = "changes the weight 'head.weight'"
HIDDEN = [
    (doing(lambda self, x: self.options["held"][0].add_(1)), r"options\['held'\]\[0\]"),
    (doing(lambda self, x: self.__dict__.update(count=self.count + 1)), "count"),
    (doing(count_in_class), "tally"),
]
SET = [
    (caching, [Traced], r"the forward sets model\.last"),
    (set_count, KINDS, r"model[\w ().]*\.count \(.*test_modes_and_state.py:\d+\)"),
    (rebind, KINDS, r"model[\w ().]*\.mean \(.*:\d+\)"),
    (on_a_layer, KINDS, r"model\.head[\w ().]*\.calls \(.*:\d+\)"),
    *((middle, [Walked], says) for middle, says in HIDDEN),
    *((middle, [Traced], TRACED) for middle, _ in HIDDEN),
    (doing(lambda self, x: self.training or count_in_class(self, x)), [Walked], "tally"),
    (doing(lambda self, x: self.register_buffer("late", x.detach().mean())), [Walked], "late"),
    (looking, [Walked], r"numbers between its layers are unknown \(AssertionError.*test_modes_and_state.py:\d+\)"),
    *[(a_weight, [Walked], "head.weight"), (a_weight, [Traced], OF_TRACE)],
]


@pytest.mark.parametrize(("middle", "kind", "says"), [(m, kind, says) for m, kinds, says in SET for kind in kinds])
def test_what_a_forward_sets_is_refused_by_attribute_and_line(middle, kind, says):
    model = made(kind, middle)
    model.options |= {"held": [torch.zeros(())]}
    with pytest.raises((qs.MisfitError, qs.UsageError), match=says):
        split(model, example=inputs()[:2])


@pytest.mark.parametrize(
    "middle",
    [lambda self, x: x if torch.rand(1).item() < 0.01 else x * 2, lambda self, x: x * random.choice([1.0, 2.0])],
    ids=["torch's", "Python's"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_python_value_of_a_draw_is_refused_under_every_seed(kind, middle):
    model = made(kind, middle)
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        with pytest.raises((qs.MisfitError, qs.UsageError), match="draw"):
            split(model, example=inputs()[:2])


def autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + self.teacher(x).to(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_inside_a_forward(kind):
    check(made(kind, autocast, torch.float32), tolerance=1e-3)


class Model(nn.Module):
    """`before` and `after` are called around the stem and the first layer."""

    def __init__(self, before, after):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(3)), nn.Linear(4, 2)
        self.before, self.after = before, after

    def forward(self, x):
        held = self.before(self)
        x = self.layers[0](self.stem(x))
        self.after(self, held)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x)


def off(model):
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return was


SWITCHES = {
    "was": (off, lambda model, was: torch.set_grad_enabled(was)),
    "training": (
        lambda model: torch.set_grad_enabled(model.head.out_features > 2),
        lambda model, held: torch.set_grad_enabled(model.training),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2", "dp=2,pp=2"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_by_calls_between_layers_holds_for_the_same_layers(switch, mesh):
    check(Model(*SWITCHES[switch]).double(), mesh=mesh, cut=partial(split, example=inputs()[:2]))
    assert torch.is_grad_enabled()


def test_a_forward_that_leaves_gradients_off_is_refused():
    with pytest.raises(qs.MisfitError, match=r"forward of Model leaves modes of torch .*gradients.*with torch.no_grad"):
        split(Model(off, lambda model, was: None), example=inputs(torch.float32)[:2])
    assert torch.is_grad_enabled()


LEAVES = {
    "gradients": lambda x: torch.set_grad_enabled(False),
    "autocast": lambda x: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
    "the default dtype": lambda x: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda x: torch.use_deterministic_algorithms(True),
}


class Leaving(nn.Linear):
    """Leaves a mode switched once it has been called `most` times."""

    def __init__(self, leave, most=0):
        super().__init__(4, 4)
        self.leave, self.most, self.calls = leave, most, 0

    def forward(self, x):
        made, self.calls = super().forward(x), self.calls + 1
        if self.calls > self.most:
            self.leave(x)
        return made


def try_to_step(*blocks, steps=1, mesh="dp=1", around=nullcontext):
    plan, x = qs.compile("1f1b", mesh=mesh, microbatches=2), inputs(torch.float32)

    def work(engine):
        for _ in range(steps):
            with around():
                engine.step(x, x[:, 0, 0])

    run_engines(plan, lambda: split(nn.Sequential(*blocks)), work, loss, sgd)


@pytest.mark.parametrize("word", LEAVES)
def test_a_block_that_leaves_modes_switched_is_refused_by_name_and_leaves_none(word):
    with pytest.raises(qs.MisfitError, match=rf"block 1 \(Leaving\) leaves modes of torch .*\({word}\)"):
        try_to_step(nn.Linear(3, 4), Leaving(LEAVES[word]), nn.Linear(4, 2))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_gradients_that_a_block_switches_off_later_end_the_step(mesh):
    with pytest.raises(qs.MisfitError, match=r"gradients are switched off where the loss|a block on this rank.*leaves"):
        try_to_step(nn.Linear(3, 4), Leaving(LEAVES["gradients"], 4), nn.Linear(4, 2), steps=4, mesh=mesh)
    torch.set_grad_enabled(True)


def test_a_step_where_gradients_are_off_is_refused():
    with pytest.raises(qs.UsageError, match="gradients are switched off"):
        try_to_step(nn.Linear(3, 4), nn.Linear(4, 2), around=torch.no_grad)


def test_every_step_whose_loss_has_no_graph_says_so(caplog):
    detached = of_kind(nn.Linear, lambda self, x: nn.Linear.forward(self, x).detach())
    try_to_step(nn.Linear(3, 4), detached(4, 2), steps=2)
    assert sum("has no graph" in record.message for record in caplog.records) == 4
