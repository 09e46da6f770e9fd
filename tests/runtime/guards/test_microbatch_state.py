"""Numbers that forwards change are named when they first change, whatever shapes have told, and once."""

import copy
import re
from collections import deque
from contextvars import Context, ContextVar
from dataclasses import dataclass
from fractions import Fraction
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from quintsched.runtime.guards.state_changed_by_forwards import LateState

from ..trials import ones, taken
from .late_layers import Layer, losses


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


def of_function(layer):
    of_function.n += 1


def of_class(layer):
    type(layer).made = getattr(type(layer), "made", 0) + 1


def of_object(layer):
    layer.stats.n += 1


def added(name, of=lambda layer: layer):
    """Return a function that counts up an attribute, by a string."""
    return lambda layer: vars(of(layer)).update({name: vars(of(layer)).get(name, 0) + 1})


of_function.n = 0
MOVES = {
    "an object": (of_object, {"stats": Stats()}, "block 0 (Layer).stats.n"),
    "slots": (of_object, {"stats": Slotted()}, "block 0 (Layer).stats.n"),
    "a dataclass": (of_object, {"stats": Record()}, "block 0 (Layer).stats.n"),
    "a tensor of an object": (lambda layer: layer.stats.total.add_(1), {"stats": Stats()}, "(Layer).stats.total"),
    "a plain tensor in place": (lambda layer: layer.t.add_(1), {"t": torch.zeros(())}, "block 0 (Layer).t"),
    "a tuple's tensor": (lambda layer: layer.t[0].add_(1), {"t": (torch.zeros(()),)}, "block 0 (Layer).t"),
    "setattr": (lambda layer: setattr(layer, "n", layer.n + 1), {"n": 0}, "block 0 (Layer).n"),
    "__dict__": (added("n"), {"n": 0}, "block 0 (Layer).n"),
    "a fraction": (lambda layer: setattr(layer, "n", layer.n * 0.9), {"n": Fraction(1)}, "block 0 (Layer).n"),
    "a list": (lambda layer: layer.held.__setitem__(0, layer.held[0] + 1), {"held": [0]}, "block 0 (Layer).held[0]"),
    "a dict": (lambda layer: layer.held.update(m=layer.held["m"] + 1), {"held": {"m": 0}}, "block 0 (Layer).held['m']"),
    "a deque": (lambda layer: layer.held.append(layer.held[0] + 1), {"held": deque([0], maxlen=1)}, "(Layer).held[0]"),
    "a namespace": (added("m", lambda layer: layer.held), {"held": SimpleNamespace(m=0)}, "m"),
    "nested": (lambda layer: layer.held["m"].append(1), {"held": {"m": [0]}}, "block 0 (Layer).held['m']"),
    "none before": (added("new"), {}, "block 0 (Layer).new"),
    "of another module": (added("n", lambda layer: layer.fc), {}, "block 0 (Layer).fc.n"),
    "a list around": (around([0], lambda kept: kept.append(1)), {}, "kept"),
    "a dict around": (around({}, lambda kept: kept.update(n=kept.get("n", 0) + 1)), {}, "kept['n']"),
    "a tensor around": (around(torch.zeros(()), lambda kept: kept.add_(1)), {}, "kept"),
    "a set around": (around(set(), lambda kept: kept.add(len(kept))), {}, "kept"),
    "an array around": (around(np.zeros(3), lambda kept: kept.__iadd__(1)), {}, "kept"),
    "a default": (lambda layer, kept=[0]: kept.__setitem__(0, kept[0] + 1), {}, "[0]"),
    "a default tensor": (lambda layer, kept=torch.zeros(()): kept.add_(1), {}, "[0]"),  # noqa: B008
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


FLAG = ContextVar("flag", default=0)


def counts_in_context(layer):
    FLAG.set(FLAG.get() + 1)


def writes_a_weight(layer):
    with torch.no_grad():
        layer.fc.bias.mul_(0.9)


def hidden(layer):
    with torch.no_grad():
        layer.teacher.weight.lerp_(layer.fc.weight, 0.5)


def frozen():
    return nn.Linear(3, 3).requires_grad_(False)


class Marked(torch.Tensor):
    pass


LATE = {
    "a flag that is turned over": (lambda layer: setattr(layer, "on", not layer.on), {"on": False}, "on"),
    "a context variable": (counts_in_context, {}, "FLAG"),
    "a weight": (writes_a_weight, {}, "fc.bias"),
    "a hidden teacher": (hidden, {"teacher": SimpleNamespace(weight=frozen().weight)}, "teacher.weight"),
    "a tensor of a class": (lambda layer: layer.t.add_(1), {"t": torch.zeros(()).as_subclass(Marked)}, "t"),
    "an array of objects": (lambda layer: layer.a.__setitem__(0, [1]), {"a": np.array([0, None], dtype=object)}, "a"),
    "an event": (lambda layer: layer.event.set(), {"event": Event}, "event._flag"),
    "an attribute of a dropout": (lambda layer: setattr(layer.fc, "n", getattr(layer.fc, "n", 0) + 1), {}, "fc.n"),
    "through .data": (lambda layer: layer.t.data.add_(1), {"t": torch.zeros(())}, "t"),
    "a frozen weight through .data": (lambda layer: layer.slow.weight.data.mul_(0.5), {"slow": frozen}, "slow.weight"),
    "a buffer": (lambda layer: setattr(layer, "n", layer.n + 1), {"n": nn.Buffer(torch.zeros(()))}, "n"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(("does", "has", "name"), LATE.values(), ids=LATE)
def test_what_begins_in_a_step_or_an_evaluation_of_a_run_is_named(does, has, name, evaluates, named):
    def begins(layer):
        if layer.late and layer.training is not evaluates:
            does(layer)
        return 1.0

    layer = Layer(begins, **{name: held() if callable(held) else held for name, held in has.items()})
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


@pytest.mark.parametrize(
    ("mesh", "microbatches", "buffers", "says"),
    [
        ("dp=1", 1, "merge", ""),
        ("dp=1", 2, "merge", "one microbatch of 2 in a step"),
        ("dp=2", 2, "merge", "one microbatch of 4 in a step: .*; parallel.buffers: sync"),
        ("dp=2", 2, "sync", "one microbatch of 2 in a step"),
        ("dp=2", 1, "sync", ""),
    ],
)
def test_batch_norms_are_named_where_a_batch_is_cut(mesh, microbatches, buffers, says, caplog):
    blocks = [nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))]
    taken(blocks, ones(8, 3, steps=2), mesh=mesh, microbatches=microbatches, buffers=buffers)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(says)
    assert re.search(says, "".join(lines))
    assert "num_batches_tracked" not in "".join(lines)


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
    x = torch.randn(3, 8, 3)
    taken([Scaled(does)], list(zip(x, x, strict=True)), mesh="dp=2", microbatches=1)
    assert named("replicas") == [f"block 0 (Scaled).{name}" for name in names]
