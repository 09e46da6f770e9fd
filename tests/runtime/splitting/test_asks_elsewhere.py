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
from collections import ChainMap
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import pytest
import torch
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


SCALED, NUMBER = functools.partial(operator.mul, 1.0), torch.ones(())
LIBRARY, LONG = textwrap.TextWrapper(), [1.0] * 2000
F.known_scale = 1.0
FOLLOWED = {
    "partial": (lambda self, x: SCALED(x), lambda: SCALED.__setstate__((operator.mul, (2.0,), {}, {}))),
    "metaclass": (lambda self, x: x * Rates.rate, lambda: setattr(Rates, "held", 3.0)),
    "tensor": (lambda self, x: x * NUMBER.item(), lambda: NUMBER.detach().numpy().fill(2.0)),
    "array": (lambda self, x: x * LARGE[5], lambda: LARGE.fill(2.0)),
    "object of a library": (lambda self, x: x * LIBRARY.rate, lambda: setattr(LIBRARY, "rate", 2.0)),
    "module of a library": (lambda self, x: x * F.known_scale, lambda: setattr(F, "known_scale", 2.0)),
    "long list": (lambda self, x: x * LONG[7], lambda: LONG.__setitem__(7, 2.0)),
    "mapping": (lambda self, x: x * CHAINED["tau"], lambda: CHAINED.maps[0].update(tau=2.0)),
    "array of Python": (lambda self, x: x * NUMBERS[0], lambda: NUMBERS.__setitem__(0, 2.0)),
    "cache": (lambda self, x: x * cached(), lambda: (STORED.update(tau=2.0), cached.cache_clear())),
}
LARGE, STORED, LIBRARY.rate = np.ones(2000), {"tau": 1.0}, 1.0


@functools.lru_cache
def cached():
    return STORED["tau"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FOLLOWED)
def test_what_is_compared_by_value_is_followed(what, kind):
    between, change = FOLLOWED[what]
    model = made(kind, between, torch.float32)
    blocks = split(model, example=X)
    change()
    for source in sources_of(blocks):
        source.follow_model()
    torch.testing.assert_close(chain(blocks, X), model(X))


REVERSED = backward_of(torch.neg)


def test_a_function_between_layers_that_are_traced_would_lose_its_backward():
    """Refuse it although its result counts for nothing at the split, where no comparison of gradients finds it."""
    with pytest.raises(MisfitError, match=r"Changed.apply \(test_asks_elsewhere.py, line \d+\) between"):
        split(made(Traced, lambda self, x: x + 0 * REVERSED(x)))
