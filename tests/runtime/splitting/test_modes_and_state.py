"""Forwards that switch modes, and read or write what the model keeps, train as in one piece, or are refused."""

import random

import pytest
import torch

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import split
from quintsched.runtime.splitting.split_proof import chain

from .models import KINDS, Traced, Walked, check, inputs, made, nothing


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


def of_attributes(self, x):
    return x * self.tau * self.options["tau"] * getattr(self.head, "scale", 1.0)


def of_a_buffer(self, x):
    return x + self.mean


def counting(self, x):
    self.steps += 1
    return x


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
    *[(all_modes, nothing), (caching, nothing), (of_attributes, set_attributes)],
    *[(of_a_buffer, set_mean), (of_a_buffer, replace_mean)],
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
