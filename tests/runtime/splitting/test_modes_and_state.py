"""Forwards that switch modes, and read or write what the model keeps, train as in one piece, or are refused."""

import random
from functools import partial

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine, run_local, split

from ...helpers.training import check_equality
from .models import KINDS, Block, Traced, Walked, check, inputs, made, nothing


def all_modes(self, x):
    with torch.no_grad():
        taught = self.teacher(x)
        with torch.set_grad_enabled(self.training):
            x = x * 1.5 + taught
    with torch.inference_mode():
        told = self.teacher(x.detach())
    return x + told.clone()


def of_attributes(self, x):
    return x * self.tau * self.options["tau"] * getattr(self.head, "scale", 1.0)


def of_a_buffer(self, x):
    return x + self.mean


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


def set_mean(model):
    model.mean.data.add_(0.5)


def replace_mean(model):
    model.mean = model.mean + 0.5


CASES = [
    *[(all_modes, nothing), (caching, nothing), (in_place, nothing), (of_attributes, set_attributes)],
    *[(of_a_buffer, set_mean), (of_a_buffer, replace_mean)],
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("middle", "change"), CASES)
def test_modes_and_what_is_read_are_the_models_own(kind, middle, change, mesh):
    check(made(kind, middle), change, mesh)


def set_count(self, x):
    self.count += 1
    return x * self.count


def rebind(self, x):
    self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
    return x - self.mean


def on_a_layer(self, x):
    self.head.calls = getattr(self.head, "calls", 0) + 1
    return x


def in_a_list(self, x):
    self.options["held"][0].add_(1)
    return x


def past_setattr(self, x):
    self.__dict__["count"] = self.count + 1
    return x


def of_the_class(self, x):
    type(self).tally = getattr(type(self), "tally", 0) + 1
    return x


def as_evaluated(self, x):
    return x if self.training else of_the_class(self, x)


def a_weight(self, x):
    with torch.no_grad():
        self.head.weight.mul_(0.9)
    return x


def a_new_buffer(self, x):
    self.register_buffer("late", x.detach().mean())
    return x


def looking(self, x):
    assert bool(torch.isfinite(x).all())
    return x


TRACED = r"the forward changes .*which no other rank would see"
OF_TRACE = "changes the weight 'head.weight'"
SET = [
    (set_count, KINDS, r"model[\w ().]*\.count \(.*test_modes_and_state.py:\d+\)"),
    (rebind, KINDS, r"model[\w ().]*\.mean \(.*:\d+\)"),
    (on_a_layer, KINDS, r"model\.head[\w ().]*\.calls \(.*:\d+\)"),
    (in_a_list, [Walked], r"options\['held'\]\[0\]"),
    *((middle, [Walked], says) for middle, says in ((past_setattr, "count"), (of_the_class, "tally"))),
    *((middle, [Walked], says) for middle, says in ((as_evaluated, "tally"), (a_new_buffer, "late"))),
    (looking, [Walked], r"numbers between its layers are unknown \(AssertionError.*test_modes_and_state.py:\d+\)"),
    *[(a_weight, [Walked], "head.weight"), (a_weight, [Traced], OF_TRACE)],
    *((middle, [Traced], TRACED) for middle in (in_a_list, past_setattr, of_the_class)),
]


@pytest.mark.parametrize(("middle", "kind", "says"), [(m, kind, says) for m, kinds, says in SET for kind in kinds])
def test_what_a_forward_sets_is_refused_by_attribute_and_line(middle, kind, says):
    model = made(kind, middle)
    model.options |= {"held": [torch.zeros(())]}
    with pytest.raises((MisfitError, UsageError), match=says):
        split(model, example=inputs()[:2])


def skip(self, x):
    return x if torch.rand(1).item() < 0.01 else x * 2


def scaled(self, x):
    return x * random.choice([1.0, 2.0])


@pytest.mark.parametrize("middle", [skip, scaled])
@pytest.mark.parametrize("kind", KINDS)
def test_a_python_value_of_a_draw_is_refused_under_every_seed(kind, middle):
    model = made(kind, middle)
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        with pytest.raises((MisfitError, UsageError), match="draw"):
            split(model, example=inputs()[:2])


def steered(self, x):
    return x if self.flag else x + self.teacher(x)


@pytest.mark.parametrize("kind", KINDS)
def test_what_steers_the_flow_may_not_change(kind):
    def change(model):
        model.flag = not model.flag

    with pytest.raises(MisfitError, match=r"flag is no longer what it was .* split the model again"):
        check(made(kind, steered), change)


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


def trains_or_not(model):
    torch.set_grad_enabled(model.head.out_features > 2)


SWITCHES = {
    "was": (off, lambda model, was: torch.set_grad_enabled(was)),
    "training": (trains_or_not, lambda model, held: torch.set_grad_enabled(model.training)),
}


def loss(output, targets):
    return (output.sum(-1) - targets).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)


def data():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.square().sum(-1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2", "dp=2,pp=2"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_by_calls_between_layers_holds_for_the_same_layers(switch, mesh):
    torch.manual_seed(0)
    model, (x, y) = Model(*SWITCHES[switch]).double(), data()
    plan, cut = qs.compile("1f1b", mesh=mesh, microbatches=2), partial(split, example=x[:2])
    check_equality(plan, model, loss, sgd, [(x, y)] * 2, cut=cut)
    assert torch.is_grad_enabled()


def test_a_forward_that_leaves_gradients_off_is_refused():
    with pytest.raises(MisfitError, match=r"forward of Model leaves modes of torch .*gradients.*with torch.no_grad"):
        split(Model(off, lambda model, was: None), example=data()[0][:2].float())
    assert torch.is_grad_enabled()


def leave_grad_off(x):
    torch.set_grad_enabled(False)


LEAVES = {
    "gradients": leave_grad_off,
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


def try_to_step(*blocks, step=lambda engine, x, y: engine.step(x, y), mesh="dp=1"):
    plan, (x, y) = qs.compile("1f1b", mesh=mesh, microbatches=2), data()

    def work(transport):
        return step(Engine(plan, split(nn.Sequential(*blocks)), loss, sgd, transport=transport), x.float(), y.float())

    return run_local(plan.mesh.size, work)


@pytest.mark.parametrize("word", LEAVES)
def test_a_block_that_leaves_modes_switched_is_refused_by_name_and_leaves_none(word):
    with pytest.raises(MisfitError, match=rf"block 1 \(Leaving\) leaves modes of torch .*\({word}\)"):
        try_to_step(nn.Linear(3, 4), Leaving(LEAVES[word]), nn.Linear(4, 2))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_gradients_that_a_block_switches_off_later_end_the_step(mesh):
    def steps(engine, x, y):
        for _ in range(4):
            engine.step(x, y)

    with pytest.raises(MisfitError, match=r"gradients are switched off where the loss|a block on this rank.*leaves"):
        try_to_step(nn.Linear(3, 4), Leaving(leave_grad_off, 4), nn.Linear(4, 2), step=steps, mesh=mesh)
    torch.set_grad_enabled(True)


def test_a_step_where_gradients_are_off_is_refused():
    def step(engine, x, y):
        with torch.no_grad():
            engine.step(x, y)

    with pytest.raises(UsageError, match="gradients are switched off"):
        try_to_step(nn.Linear(3, 4), nn.Linear(4, 2), step=step)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


def test_every_step_whose_loss_has_no_graph_says_so(caplog):
    def steps(engine, x, y):
        for _ in range(2):
            engine.step(x, y)

    try_to_step(nn.Linear(3, 4), Detached(4, 2), step=steps)
    assert sum("has no graph" in record.message for record in caplog.records) == 4
