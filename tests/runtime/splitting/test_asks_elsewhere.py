"""Code between the layers of a model that asks elsewhere is refused at the split, by what it asks, file and line."""

import array
import bisect
import functools
import heapq
import logging
import operator
import os
import textwrap
import threading
import time
import types
import weakref
from collections import ChainMap, OrderedDict
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime import split
from quintsched.runtime.splitting.split_proof import chain
from quintsched.runtime.user_objects.changes_since_split import sources_of

from ..examine.backward_blocks import backward_of
from .models import KINDS, Traced, Walked, inputs, made

X = inputs(torch.float32)
LOGGER = logging.getLogger(__name__)
VARIABLE, EVENT, TABLE = ContextVar("variable", default=1.0), threading.Event(), np.ones((1 << 18) + 1)
HELD, CHAINED, NUMBERS = weakref.ref(EVENT), ChainMap({"tau": 1.0}), array.array("d", [1.0])


def split_made(kind, between):
    return split(made(kind, between, torch.float32), example=X[:2] if kind is Walked else None)


@functools.lru_cache
def scale():
    return 1.0


def known_helper(x):
    return x * (time.monotonic() > 0)


ASKS = {
    r"os.environ \(": lambda self, x: x * float(os.environ.get("TAU", "1")),
    r"pathlib\S*\.Path\.read_text \(": lambda self, x: x * (Path(__file__).read_text() != ""),
    r"_contextvars.ContextVar.get \(": lambda self, x: x * VARIABLE.get(),
    r"torch.get_float32_matmul_precision \(": lambda self, x: x * len(torch.get_float32_matmul_precision()),
    r"time.monotonic \(": lambda self, x: known_helper(x),
    r"threading.Event.is_set \(": lambda self, x: x * EVENT.is_set(),
    r"HELD \(weakref": lambda self, x: x if HELD() else -x,
    r"TABLE \(numpy": lambda self, x: x * TABLE[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_code_between_layers_asks_is_refused_by_line(kind):
    for says, between in ASKS.items():
        line = "test_asks_elsewhere.py, line" if says.endswith(r"\(") else ""
        with pytest.raises(MisfitError, match=rf"^the forward of {kind.__name__} \w+ .*{says}.*{line}.*attribute"):
            split_made(kind, between)


PLAIN = [
    lambda self, x: x * self.tau * scale() * CHAINED["tau"] * types.MappingProxyType({1: 1.0})[1],
    lambda self, x: x if torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled() else x * 1,
    lambda self, x: (LOGGER.info("told"), x * np.sqrt(2.0))[1],
    lambda self, x: x * (1 + bisect.bisect([1.0, 2.0], self.tau) + heapq.nsmallest(1, [self.tau])[0]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_code_is_not(kind):
    for between in PLAIN:
        assert len(split_made(kind, between)) > 1


class Counted(type):
    @property
    def rate(cls):
        return cls.held


class Rates(metaclass=Counted):
    held = 1.0


class Scheduled:
    """A descriptor that keeps the value itself."""

    value = 1.0

    def __get__(self, owner, kind):
        return self.value

    def __set__(self, owner, value):
        self.value = value


class Whole:
    factor = 1.0


class Half:
    factor = 0.5


class Rate(float):
    factor = 1.0


@functools.lru_cache
def cached():
    return STORED["tau"]


SCALED, NUMBER = functools.partial(operator.mul, 1.0), torch.ones(())
LIBRARY, LONG, SETTINGS = textwrap.TextWrapper(), [1.0] * 2000, types.ModuleType("settings_of_a_user")
LARGE, STORED, LIBRARY.rate, SETTINGS.rate, F.known_scale = np.ones(2000), {"tau": 1.0}, 1.0, 1.0, 1.0
FOLLOWED = {
    "partial": (lambda self, x: SCALED(x), lambda _: SCALED.__setstate__((operator.mul, (2.0,), {}, {}))),
    "metaclass": (lambda self, x: x * Rates.rate, lambda _: setattr(Rates, "held", 3.0)),
    "tensor": (lambda self, x: x * NUMBER.item(), lambda _: NUMBER.detach().numpy().fill(2.0)),
    "array": (lambda self, x: x * LARGE[5], lambda _: LARGE.fill(2.0)),
    "object of a library": (lambda self, x: x * LIBRARY.rate, lambda _: setattr(LIBRARY, "rate", 2.0)),
    "module of a library": (lambda self, x: x * F.known_scale, lambda _: setattr(F, "known_scale", 2.0)),
    "module": (lambda self, x: x * SETTINGS.rate, lambda _: setattr(SETTINGS, "rate", 0.5)),
    "long list": (lambda self, x: x * LONG[7], lambda _: LONG.__setitem__(7, 2.0)),
    "mapping": (lambda self, x: x * CHAINED["tau"], lambda _: CHAINED.maps[0].update(tau=2.0)),
    "array of Python": (lambda self, x: x * NUMBERS[0], lambda _: NUMBERS.__setitem__(0, 2.0)),
    "cache": (lambda self, x: x * cached(), lambda _: (STORED.update(tau=2.0), cached.cache_clear())),
    "attribute of a number": (lambda self, x: x * self.tau.factor, lambda model: setattr(model.tau, "factor", 0.5)),
    "class": (lambda self, x: x * self.last.factor, lambda model: setattr(model.last, "__class__", Half)),
    "attribute of a mapping": (
        lambda self, x: x * getattr(self.options, "factor", 1.0),
        lambda model: setattr(model.options, "factor", 0.5),
    ),
    "name": (lambda self, x: x * (1 + ("late" in vars(self))), lambda model: setattr(model, "late", 1)),
    "__getattr__": (lambda self, x: x * self.asked, lambda model: setattr(model.last, "factor", 0.5)),
    "descriptor": (lambda self, x: x * self.scheduled, lambda model: setattr(model, "scheduled", 0.5)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FOLLOWED)
def test_what_is_compared_by_value_is_followed(what, kind):
    between, change = FOLLOWED[what]
    model = made(kind, between, torch.float32)
    model.tau, model.last, model.options = Rate(1.0), Whole(), OrderedDict()
    type(model).scheduled, inherited = Scheduled(), nn.Module.__getattr__
    type(model).__getattr__ = lambda self, name: self.last.factor if name == "asked" else inherited(self, name)
    blocks = split(model, example=X)
    change(model)
    for source in sources_of(blocks):
        source.follow_model()
    torch.testing.assert_close(chain(blocks, X), model(X))


REVERSED = backward_of(torch.neg)


def test_a_function_between_layers_that_are_traced_would_lose_its_backward():
    """Refuse it although its result counts for nothing at the split, where no comparison of gradients finds it."""
    with pytest.raises(MisfitError, match=r"Changed.apply \(test_asks_elsewhere.py, line \d+\) between"):
        split(made(Traced, lambda self, x: x + 0 * REVERSED(x)))
