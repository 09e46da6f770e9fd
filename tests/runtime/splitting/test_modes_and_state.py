"""Forwards that switch modes, and read or write what the model keeps, train as in one piece, or are refused."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine, run_local, split

WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


class Traced(nn.Module):
    """Three attributes and no list: found by tracing. `middle` is between its modules."""

    def __init__(self):
        super().__init__()
        self.stem, self.teacher, self.head = nn.Linear(3, WIDTH), Block(), nn.Linear(WIDTH, 2)
        self.make_layers()
        self.tau, self.count, self.flag, self.last, self.options = 1.0, 0, True, None, {"tau": 1.0}
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def make_layers(self):
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.head(self.second(self.middle(self.first(self.stem(x)))))


class Walked(Traced):
    """The same with a list of layers, of which an example is given."""

    def make_layers(self):
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.middle(layer(x))
        return self.head(x)


def no_grad(self, x):
    with torch.no_grad():
        taught = self.teacher(x)
    return x + taught


def all_modes(self, x):
    with torch.no_grad():
        taught = self.teacher(x)
        with torch.set_grad_enabled(self.training):
            x = x * 1.5 + taught
    with torch.inference_mode():
        told = self.teacher(x.detach())
    return x + told.clone()


def autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + self.teacher(x).to(x.dtype)


def temperature(self, x):
    return x * self.tau


def option(self, x):
    return x * self.options["tau"]


def on_head(self, x):
    return x * getattr(self.head, "scale", 1.0)


def buffer(self, x):
    return x + self.mean


def counting(self, x):
    self.steps += 1
    return x


def drawing_free(self, x):
    self.last = torch.ones(x.shape[-1], dtype=x.dtype) if self.last is None else self.last
    return x * self.last


def nothing(model):
    pass


def set_tau(model):
    model.tau *= 0.7


def set_option(model):
    model.options["tau"] = 0.5


def set_scale(model):
    model.head.scale = getattr(model.head, "scale", 1.0) * 0.5


def set_mean(model):
    model.mean.data.add_(0.5)


def replace_mean(model):
    model.mean = model.mean + 0.5


def made(kind, middle, dtype=torch.float64):
    torch.manual_seed(0)
    model = type(middle.__name__, (kind,), {"middle": middle, "__module__": __name__})().to(dtype)
    for layer in (model.teacher, model.head):
        nn.init.normal_(layer.fc2.weight if layer is model.teacher else layer.weight, std=0.2)
    return model


def inputs(dtype=torch.float64):
    return torch.randn(8, 3, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss(output, targets):
    return (output.flatten(1).sum(1) - targets).square().sum(), len(targets)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.003)


def trained(model, change, mesh, steps=3):
    """Return the losses and buffers of each rank, and of a plain loop over the same microbatches."""
    batch = inputs(model.head.weight.dtype)
    example = batch[:2] if isinstance(model, Walked) else None
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4 // (2 if "dp" in mesh else 1))

    def work(transport):
        own = copy.deepcopy(model)
        engine = Engine(plan, split(own, example=example), loss, sgd, transport=transport)
        mine, losses = batch.chunk(engine.num_replicas)[engine.replica], []
        for _ in range(steps):
            losses.append(engine.step(mine, mine[:, 0, 0]).loss.item())
            change(own)
        return losses

    plain, expected = copy.deepcopy(model), []
    optimizer = sgd(plain.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        totals = [loss(plain(piece), piece[:, 0, 0])[0] for piece in batch.split(2)]
        (sum(totals) / 8).backward()
        optimizer.step()
        change(plain)
        expected.append(sum(totals).item() / 8)
    return run_local(plan.mesh.size, work), expected


CASES = [
    *((middle, nothing) for middle in (no_grad, all_modes)),
    *[(temperature, set_tau), (option, set_option), (on_head, set_scale), (buffer, set_mean), (buffer, replace_mean)],
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("kind", [Traced, Walked])
@pytest.mark.parametrize(("middle", "change"), CASES)
def test_modes_and_what_is_read_are_the_models_own(kind, middle, change, mesh):
    found, expected = trained(made(kind, middle), change, mesh)
    assert found == [pytest.approx(expected, rel=1e-10)] * len(found)


@pytest.mark.parametrize("kind", [Traced, Walked])
def test_autocast_inside_a_forward(kind):
    found, expected = trained(made(kind, autocast, torch.float32), nothing, "pp=2")
    assert found == [pytest.approx(expected, rel=1e-3)] * 2


def test_a_buffer_is_counted_on_by_the_block_that_has_it():
    model = made(Traced, counting)
    blocks = split(model, example=inputs()[:2])
    assert model.steps == 0
    x = inputs()
    for block in blocks:
        x = block(x)
    assert model.steps == 1


def test_a_table_that_a_forward_makes_of_shapes_may_be_kept():
    found, expected = trained(made(Walked, drawing_free), nothing, "pp=2")
    assert found == [pytest.approx(expected, rel=1e-10)] * 2


def set_count(self, x):
    self.count += 1
    return x * self.count


def set_flag(self, x):
    self.flag = False
    return x


def remember(self, x):
    self.last = x.detach()
    return x


def rebind(self, x):
    self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
    return x - self.mean


def append(self, x):
    self.options["seen"] = self.options.get("seen", 0) + 1
    return x


def set_on_head(self, x):
    self.head.calls = 1
    return x


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (set_count, r"model[\w ().]*\.count \(.*test_modes_and_state.py:\d+\)"),
        (set_flag, r"model[\w ().]*\.flag \(.*:\d+\)"),
        (remember, r"model[\w ().]*\.last \(.*:\d+\)"),
        (rebind, r"model[\w ().]*\.mean \(.*:\d+\)"),
        (append, r"model[\w ().]*\.options.* \(.*:\d+\)"),
        (set_on_head, r"model\.head[\w ().]*\.calls \(.*:\d+\)"),
    ],
)
@pytest.mark.parametrize("kind", [Traced, Walked])
def test_what_a_forward_sets_is_refused_by_attribute_and_line(kind, middle, says):
    with pytest.raises((MisfitError, UsageError), match=says):
        split(made(kind, middle), example=inputs()[:2])


def skip(self, x):
    return x if random.random() < 0.01 else x * 2


def skip_by_tensor(self, x):
    return x if torch.rand(1).item() < 0.01 else x * 2


def scaled(self, x):
    return x * random.choice([1.0, 2.0])


@pytest.mark.parametrize("middle", [skip, skip_by_tensor, scaled])
@pytest.mark.parametrize("kind", [Traced, Walked])
def test_a_python_value_of_a_draw_is_refused_under_every_seed(kind, middle):
    model = made(kind, middle)
    for seed in range(4):
        torch.manual_seed(seed)
        random.seed(seed)
        with pytest.raises((MisfitError, UsageError), match="draw"):
            split(model, example=inputs()[:2])


def steered(self, x):
    return x if self.flag else x + self.teacher(x)


def cut(self, x):
    return x[:, : 3 - self.count]


@pytest.mark.parametrize(("middle", "name"), [(steered, "flag"), (cut, "count")])
@pytest.mark.parametrize("kind", [Traced, Walked])
def test_what_steers_the_flow_may_not_change(kind, middle, name):
    def change(model):
        setattr(model, name, 1 - getattr(model, name))

    with pytest.raises(MisfitError, match=rf"{name} is no longer what it was .* split the model again"):
        trained(made(kind, middle), change, "pp=2")
