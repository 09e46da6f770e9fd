"""Numbers that forwards change are named when they first change, whatever shapes have told, and once."""

import copy
import io
import logging
from array import array
from collections import deque
from contextvars import Context, ContextVar
from dataclasses import dataclass
from fractions import Fraction
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import split
from quintsched.runtime.examine.microbatch_state import LateState

from ...helpers.training import require_equal, train_alone, train_ranks
from .trials import engine_of, ones, sgd, taken

RUNS = 0


@pytest.fixture
def named(caplog):
    """Return what gives the places that were said to be changed."""
    caplog.set_level(logging.WARNING, "quintsched")
    return lambda words="changed by forwards": [
        record.message.partition(": ")[0] for record in caplog.records if words in record.message
    ]


class Counter(nn.Module):
    total = 0

    def __init__(self):
        super().__init__()
        self.go, self.calls, self.amax, self.rate = False, 0, 1.0, 0.1

    def forward(self, x):
        self.amax = max(self.amax, float(x.max()))
        if self.go:
            self.count()
        return x * self.rate

    def count(self):
        global RUNS
        self.calls += 1
        type(self).total += 1
        RUNS += 1


def test_what_begins_late_is_named_once(caplog, named):
    model = nn.Sequential(Counter(), nn.Linear(1, 1))
    state, lines = LateState({"3": model}, are_whole=True), []
    for step in range(5):
        model[0].rate *= 0.5
        model[0].go = step > 1
        state.begin_step(is_due=False)
        model(torch.ones(1, 1) + (step == 1))
        caplog.clear()
        state.tell(2, 2)
        lines.append(named(""))
    amax, calls = "block 3 (Sequential).0.amax", "block 3 (Sequential).0.calls"
    assert lines == [[], [amax] * 2, [f"{calls}, Counter.total, RUNS"] * 2, [], []]


def test_what_was_named_before_is_not_said_again(caplog):
    model = Counter()
    state = LateState({"0": model}, are_whole=True)
    state.known, model.go = ["block 0 (Counter).calls", "Counter.total", "RUNS"], True
    state.begin_step(is_due=False)
    model(torch.ones(1, 1))
    state.tell(2, 1)
    assert not caplog.records


class Layer(nn.Module):
    """A residual layer; what it does besides is given."""

    def __init__(self, does, **has):
        super().__init__()
        self.fc, self.does, self.late = nn.Linear(3, 3), does, False
        vars(self).update(has)

    def forward(self, x):
        return x + torch.tanh(self.fc(x)) * self.does(self)


def counted(layer):
    if layer.late:
        layer.n += 1
    return 1 / (1 + layer.n)


def in_evaluations(layer):
    if not layer.training:
        layer.n += 1
    return 1 / (1 + layer.n)


class Stats:
    def __init__(self):
        self.n = 0
        self.total = torch.zeros(())


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


@dataclass
class Record:
    n: int = 0


def around(kept, change):
    """Return a function that changes what is around it."""

    def count(layer):
        change(kept)

    return count


def beside(layer, kept=[0]):  # noqa: B006
    kept[0] += 1


def of_function(layer):
    of_function.n += 1


def of_class(layer):
    type(layer).made = getattr(type(layer), "made", 0) + 1


def by_name(layer):
    setattr(layer, "n", layer.n + 1)  # noqa: B010


def by_fraction(layer):
    layer.n = layer.n * Fraction(9, 10)


def of_object(layer):
    layer.stats.n += 1


def beside_in_place(layer, kept=torch.zeros(())):  # noqa: B008
    kept.add_(1)


of_function.n = 0
MOVES = {
    "an object": (of_object, {"stats": Stats()}, "block 0 (Layer).stats.n"),
    "slots": (of_object, {"stats": Slotted()}, "block 0 (Layer).stats.n"),
    "a dataclass": (of_object, {"stats": Record()}, "block 0 (Layer).stats.n"),
    "a tensor of an object": (
        lambda layer: layer.stats.total.add_(1),
        {"stats": Stats()},
        "block 0 (Layer).stats.total",
    ),
    "a plain tensor in place": (lambda layer: layer.t.add_(1), {"t": torch.zeros(())}, "block 0 (Layer).t"),
    "a tuple's tensor": (lambda layer: layer.t[0].add_(1), {"t": (torch.zeros(()),)}, "block 0 (Layer).t"),
    "setattr": (by_name, {"n": 0}, "block 0 (Layer).n"),
    "__dict__": (lambda layer: vars(layer).update(n=layer.n + 1), {"n": 0}, "block 0 (Layer).n"),
    "a fraction": (by_fraction, {"n": Fraction(1)}, "block 0 (Layer).n"),
    "a list": (lambda layer: layer.held.__setitem__(0, layer.held[0] + 1), {"held": [0]}, "block 0 (Layer).held[0]"),
    "a dict": (lambda layer: layer.held.update(m=layer.held["m"] + 1), {"held": {"m": 0}}, "block 0 (Layer).held['m']"),
    "a deque": (lambda layer: layer.held.append(layer.held[0] + 1), {"held": deque([0], maxlen=1)}, "(Layer).held[0]"),
    "a namespace": (lambda layer: layer.held.__dict__.update(m=layer.held.m + 1), {"held": SimpleNamespace(m=0)}, "m"),
    "nested": (lambda layer: layer.held["m"].append(1), {"held": {"m": [0]}}, "block 0 (Layer).held['m']"),
    "none before": (lambda layer: vars(layer).update(new=vars(layer).get("new", 0) + 1), {}, "block 0 (Layer).new"),
    "of another module": (
        lambda layer: vars(layer.fc).update(n=vars(layer.fc).get("n", 0) + 1),
        {},
        "block 0 (Layer).fc.n",
    ),
    "a list around": (around([0], lambda kept: kept.append(1)), {}, "kept"),
    "a dict around": (around({}, lambda kept: kept.update(n=kept.get("n", 0) + 1)), {}, "kept['n']"),
    "a tensor around": (around(torch.zeros(()), lambda kept: kept.add_(1)), {}, "kept"),
    "a set around": (around(set(), lambda kept: kept.add(len(kept))), {}, "kept"),
    "an array around": (around(np.zeros(3), lambda kept: kept.__iadd__(1)), {}, "kept"),
    "a default": (beside, {}, "[0]"),
    "a default tensor": (beside_in_place, {}, "[0]"),
    "an attribute of a function": (of_function, {}, "['n']"),
    "an attribute of the class": (of_class, {}, "Layer.made"),
}


@pytest.mark.parametrize("begins", [0, 2])
@pytest.mark.parametrize(("does", "has", "name"), MOVES.values(), ids=MOVES)
def test_all_that_code_can_change_is_named_whenever_it_begins(does, has, name, begins, caplog, named):
    layer = Layer(lambda layer, does=does: does(layer) if layer.late else None, **copy.deepcopy(has))
    state = LateState({"0": layer}, are_whole=True)
    for step in range(begins + 3):
        layer.late = step >= begins
        state.begin_step(is_due=step in (0, 1, 2, 4))
        layer.does(layer)
        caplog.clear() if step < begins else None
        state.tell(2, 1)
    (said,) = named("")
    assert said.endswith(name)
    vars(Layer).get("made") and delattr(Layer, "made")


def test_what_is_as_it_was_or_a_table_is_not_named(caplog):
    def replaces(layer):
        layer.sizes, layer.shape, layer.device = [3, {"a": 4}], torch.Size([3]), torch.device("cpu")
        layer.tables[len(layer.tables)] = torch.ones(1)
        layer.array = np.zeros(2)

    layer = Layer(replaces, sizes=[3, {"a": 4}], shape=torch.Size([3]), device=torch.device("cpu"), tables={0: 1})
    layer.array = np.zeros(2)
    state = LateState({"0": layer}, are_whole=True)
    for _ in range(3):
        state.begin_step(is_due=True)
        layer.does(layer)
        state.tell(2, 2)
    assert not caplog.records


def test_what_a_loop_puts_in_is_looked_at_too(named):
    layer = Layer(of_object, stats=None)
    state = LateState({"0": layer}, are_whole=True)
    for step in range(4):
        layer.stats = Stats() if step == 2 else layer.stats
        state.begin_step(is_due=False)
        if step == 3:
            layer.does(layer)
        state.tell(2, 1)
    assert named("") == ["block 0 (Layer).stats.n"]


def turned(layer):
    layer.on = not layer.on


FLAG = ContextVar("flag", default=0)


def counts_in_context(layer):
    FLAG.set(FLAG.get() + 1)


def writes_a_weight(layer):
    with torch.no_grad():
        layer.fc.bias.mul_(0.9)


def hidden(layer):
    with torch.no_grad():
        layer.teacher.weight.lerp_(layer.fc.weight, 0.5)


def kept_apart():
    """Return a frozen layer of which its module does not know."""
    teacher = nn.Linear(3, 3).requires_grad_(False)
    return SimpleNamespace(weight=teacher.weight)


class Marked(torch.Tensor):
    pass


LATE = {
    "a flag that is turned over": (turned, {"on": False}, "on"),
    "a context variable": (counts_in_context, {}, "FLAG"),
    "a weight": (writes_a_weight, {}, "fc.bias"),
    "a hidden teacher": (hidden, {"teacher": kept_apart()}, "teacher.weight"),
    "a tensor of a class": (lambda layer: layer.t.add_(1), {"t": torch.zeros(()).as_subclass(Marked)}, "t"),
    "an array of objects": (lambda layer: layer.a.__setitem__(0, [1]), {"a": np.array([0, None], dtype=object)}, "a"),
    "an event": (lambda layer: layer.event.set(), {"event": Event}, "event._flag"),
    "an attribute of a dropout": (lambda layer: setattr(layer.fc, "n", getattr(layer.fc, "n", 0) + 1), {}, "fc.n"),
    "through .data": (lambda layer: layer.t.data.add_(1), {"t": torch.zeros(())}, "t"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(("does", "has", "name"), LATE.values(), ids=LATE)
def test_what_begins_in_a_step_or_an_evaluation_of_a_run_is_named(does, has, name, evaluates, named):
    def begins(layer):
        if layer.late and layer.training is not evaluates:
            does(layer)
        return 1.0

    layer = Layer(begins, **{name: held() if held is Event else held for name, held in has.items()})
    Context().run(losses, layer, steps=5)
    assert [line.rpartition(".")[2] for line in named()] == [name.rpartition(".")[2]]


class Running(nn.Module):
    """Takes a running mean away, which training moves."""

    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def with_hook(layer):
    running = Running()
    layer.fc.register_forward_hook(lambda module, args, output: running(output))


def with_module(layer):
    layer.act = Running()


@pytest.mark.parametrize(("puts", "name"), [(with_hook, "running (Running).mean"), (with_module, "act.mean")])
def test_what_a_loop_puts_in_later_is_looked_at_from_then_on(puts, name, named):
    def make():
        torch.manual_seed(0)
        layer = Layer(lambda layer: 1.0)
        layer.act = nn.Identity()
        layer.forward = lambda x: layer.act(layer.fc(x))
        return [layer]

    def change(blocks, step):
        if step == 3:
            puts(blocks[0])

    taken(make, ones(4, 3, steps=6), mesh="pp=1", schedule="gpipe", change=change)
    (said,) = named()
    assert said.endswith(name)


class ByStatistics(nn.Module):
    """Normalises by the running mean of a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.num_batches_tracked = None

    def forward(self, x):
        self.norm(x)
        return x - self.norm.running_mean.clone()


@pytest.mark.parametrize(("mesh", "microbatches", "says"), [("dp=2", 1, "replicas"), ("dp=1", 2, "microbatches")])
def test_statistics_of_norms_that_a_forward_goes_by_are_named(mesh, microbatches, says, named):
    taken([nn.Linear(3, 3), ByStatistics()], ones(4, 3, steps=2), mesh=mesh, microbatches=microbatches)
    assert any("block 1 (ByStatistics).norm.running_mean" in place for place in named(says))


def normed(layer, x):
    if layer.scale is None:
        layer.scale = float(x.detach().std())
    return x / layer.scale


def tabled(layer, x):
    if layer.scale is None:
        layer.scale = float(x.shape[1])
    return x / layer.scale


def previous(layer, x):
    layer.found["scale"], before = float(x.detach().std()), layer.found.get("scale", 1.0)
    return x / before


class Scaled(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.fc, self.does, self.scale, self.found = nn.Linear(3, 3), does, None, {}

    def forward(self, x):
        return self.does(self, self.fc(x))


@pytest.mark.parametrize(("does", "names"), [(normed, ["scale"]), (tabled, []), (previous, ["found['scale']"])])
def test_what_replicas_make_of_their_own_samples_is_named(does, names, named):
    torch.manual_seed(0)
    x = torch.randn(3, 8, 3)
    taken([Scaled(does)], list(zip(x, x, strict=True)), mesh="dp=2", microbatches=1)
    assert named("replicas") == [f"block 0 (Scaled).{name}" for name in names]


class Cached(nn.Module):
    """Makes a table where it has none, as of cosines: no state."""

    def __init__(self):
        super().__init__()
        self.fc, self.tables = nn.Linear(3, 3), {}

    def forward(self, x):
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.cos(torch.arange(x.shape[1], dtype=x.dtype, device=x.device))
        return self.fc(x) * self.tables[x.shape[1]]


def test_a_table_that_is_made_once_is_no_state_of_replicas(named):
    taken([Cached()], ones(8, 3, steps=3), mesh="dp=2", microbatches=1)
    assert named() == []


def averaged(layer):
    if layer.training:
        with torch.no_grad():
            for slow, fast in zip(layer.slow.parameters(), layer.fc.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
    return layer.slow.weight.sum()


def halved(layer):
    if layer.late:
        layer.slow.weight.data.mul_(0.5)
    return layer.slow.weight.sum()


def losses(layer, steps=4, microbatches=2):
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 3), layer, nn.Linear(3, 3)]
    engine, found = engine_of(None, blocks, mesh="pp=1", schedule="gpipe", microbatches=microbatches), []
    for step in range(steps):
        layer.late = step > 1
        x = torch.ones(4, 3) * (1 + step)
        found.append(engine.step(x, x).loss.item())
        engine.evaluate(x, x)
    return found


def with_buffer(does):
    layer = Layer(does)
    layer.register_buffer("n", torch.zeros(()))
    return layer


def with_teacher(does):
    layer = Layer(does)
    layer.slow = copy.deepcopy(layer.fc).requires_grad_(False)
    return layer


NAMED = {
    "a buffer, late": (with_buffer(counted), "block 1 (Layer).n"),
    "a buffer, in evaluations": (with_buffer(in_evaluations), "block 1 (Layer).n"),
    "a teacher that begins as a copy": (
        with_teacher(averaged),
        "block 1 (Layer).slow.weight, block 1 (Layer).slow.bias",
    ),
    "through .data, late": (with_teacher(halved), "block 1 (Layer).slow.weight"),
}


@pytest.mark.parametrize(("layer", "name"), NAMED.values(), ids=NAMED)
def test_what_forwards_change_late_is_named_in_a_run(layer, name, named):
    losses(layer, steps=6)
    assert named() == [name]


def appended(layer):
    layer.held.append(1)
    return 1 / len(layer.held)


def written(layer):
    layer.held.write("x" if isinstance(layer.held, io.StringIO) else b"x")
    return 1 / layer.held.tell()


HELD = {
    "array": (appended, array("l")),
    "bytearray": (appended, bytearray()),
    "text": (written, io.StringIO()),
    "bytes": (written, io.BytesIO()),
}


@pytest.mark.parametrize(("does", "held"), HELD.values(), ids=HELD)
def test_trials_put_back_what_is_in_memory(does, held):
    def count(layer):
        layer.held += 1
        return 1 / layer.held

    layers = []
    for what, memory in ((does, held), (count, 0)):
        torch.manual_seed(0)
        layers.append(Layer(what, held=memory))
    assert losses(layers[0], microbatches=1) == losses(layers[1], microbatches=1)


def next_of(layer):
    if layer.held is None:
        layer.held = iter([1.0] * 100)
    return next(layer.held)


def queued(layer):
    layer.held.put(1)
    return 1 / layer.held.qsize()


@pytest.mark.parametrize(("does", "held"), [(next_of, None), (queued, SimpleQueue())])
def test_what_cannot_be_put_back_is_refused_when_it_is_made_too(does, held):
    with pytest.raises(MisfitError, match=r"block 1 \(Layer\) goes by .*\.held, a .*cannot be put back"):
        losses(Layer(does, held=held))


class Frozen(nn.Linear):
    """A linear layer that is trained from the second step on."""

    def __init__(self):
        super().__init__(3, 3)
        self.step = 0

    def forward(self, x):
        self.requires_grad_(self.step > 0)
        return torch.tanh(super().forward(x))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Frozen(), Frozen()]), nn.Linear(3, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_forward_that_freezes_its_own_weights_is_split():
    def change(model, step):
        for layer in model.layers:
            layer.step = step

    torch.manual_seed(0)
    model, x = Whole(), torch.ones(4, 3)
    given = model, F.mse_loss, sgd, [(x, 2 * x)] * 3
    ranks = train_ranks(qs.compile("gpipe", mesh="pp=2", microbatches=2), *given, before=change)
    require_equal(ranks, train_alone(*given, dtype=None, before=change), 1e-6)


FACTOR = ContextVar("factor", default=0.0)


class Contextual(nn.Module):
    """Hands on through a context variable what its next forward goes by."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x):
        h, factor = torch.tanh(self.fc1(x)), FACTOR.get()
        FACTOR.set(h.detach().mean())
        return x + self.fc2(h) * (1 + factor)


@pytest.mark.parametrize("mesh", ["pp=1", "tp=2"])
def test_what_trials_put_into_context_variables_is_gone(mesh):
    torch.manual_seed(0)
    numbers = [torch.randn(4, 3, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    given = [Contextual()], F.mse_loss, sgd, list(zip(numbers[:3], numbers[3:], strict=True))
    ranks = train_ranks(qs.compile("1f1b", mesh=mesh, microbatches=1), *given)
    require_equal(ranks, Context().run(lambda: train_alone(*given, dtype=torch.float32)), 1e-5)


class Warming(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        x = x * (self.steps / 10).clamp(max=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_buffer_of_the_model_that_code_between_layers_changes_is_named(caplog, named):
    taken(lambda: split(Warming(), example=torch.ones(4, 3)), ones(4, 3))
    assert "steps" in [place.rpartition(".")[2] for place in named("changed by forwards, of which a step has 2")]


def test_a_buffer_that_the_loop_deletes_is_none_of_replicas():
    def change(blocks, step):
        if step == 1:
            del blocks[0].n
            blocks[0].n = 0.5

    layer = with_buffer(lambda layer: 1 + layer.n)
    taken([layer], ones(8, 3, steps=3), mesh="dp=2", microbatches=1, change=change)
