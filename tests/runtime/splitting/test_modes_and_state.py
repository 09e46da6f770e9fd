"""Forwards that switch modes, and read or write what the model keeps, train as in one piece, or are refused."""

import random

import pytest
import torch

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import split
from quintsched.runtime.splitting.split_proof import chain

from .models import KINDS, Traced, Walked, check, inputs, made, nothing


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


CASES = [
    *((middle, nothing) for middle in (no_grad, all_modes, drawing_free)),
    *[(temperature, set_tau), (option, set_option), (on_head, set_scale), (buffer, set_mean), (buffer, replace_mean)],
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("middle", "change"), CASES)
def test_modes_and_what_is_read_are_the_models_own(kind, middle, change, mesh):
    check(made(kind, middle), change, mesh)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_inside_a_forward(kind):
    check(made(kind, autocast, torch.float32), tolerance=1e-3)


def test_a_buffer_is_counted_on_by_the_block_that_has_it():
    model = made(Traced, counting)
    blocks = split(model, example=inputs()[:2])
    assert model.steps == 0
    chain(blocks, inputs())
    assert model.steps == 1


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


TRACED = r"the forward changes .*which no other rank would see"
SET = [
    (set_count, KINDS, r"model[\w ().]*\.count \(.*test_modes_and_state.py:\d+\)"),
    (set_flag, KINDS, r"model[\w ().]*\.flag \(.*:\d+\)"),
    (remember, KINDS, r"model[\w ().]*\.last \(.*:\d+\)"),
    (rebind, KINDS, r"model[\w ().]*\.mean \(.*:\d+\)"),
    (append, KINDS, r"model[\w ().]*\.options.* \(.*:\d+\)"),
    (set_on_head, KINDS, r"model\.head[\w ().]*\.calls \(.*:\d+\)"),
    (in_a_list, [Walked], r"options\['seen'\]\[0\]"),
    (past_setattr, [Walked], "count"),
    (of_the_class, [Walked], "tally"),
    (as_evaluated, [Walked], "tally"),
    (on_a_layer_of_torch, [Walked], "seen"),
    (a_new_buffer, [Walked], "late"),
    (looking, [Walked], r"numbers between its layers are unknown \(AssertionError.*test_modes_and_state.py:\d+\)"),
    (a_weight, [Walked], "head.weight"),
    (a_weights_data, [Walked], "head.weight"),
    (a_weight, [Traced], r"changes the weight 'head.weight'|sets .data of a tensor"),
    (a_weights_data, [Traced], r"changes the weight 'head.weight'|sets .data of a tensor"),
    *((middle, [Traced], TRACED) for middle in (in_a_list, past_setattr, of_the_class)),
]


@pytest.mark.parametrize(("middle", "kind", "says"), [(m, kind, says) for m, kinds, says in SET for kind in kinds])
def test_what_a_forward_sets_is_refused_by_attribute_and_line(middle, kind, says):
    model = made(kind, middle)
    model.options |= {"seen": [torch.zeros(())]} if middle is in_a_list else {}
    with pytest.raises((MisfitError, UsageError), match=says):
        split(model, example=inputs()[:2])


def skip(self, x):
    return x if random.random() < 0.01 else x * 2


def skip_by_tensor(self, x):
    return x if torch.rand(1).item() < 0.01 else x * 2


def scaled(self, x):
    return x * random.choice([1.0, 2.0])


@pytest.mark.parametrize("middle", [skip, skip_by_tensor, scaled])
@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.parametrize("kind", KINDS)
def test_what_steers_the_flow_may_not_change(kind, middle, name):
    def change(model):
        setattr(model, name, 1 - getattr(model, name))

    with pytest.raises(MisfitError, match=rf"{name} is no longer what it was .* split the model again"):
        check(made(kind, middle), change)
