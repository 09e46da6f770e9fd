"""Code that asks elsewhere is heard by what it asks and where; plain code, and what only tells, is not."""

import array
import contextvars
import ctypes
import functools
import inspect
import itertools
import logging
import operator
import os
import random
import sys
import threading
import time
import weakref
from collections import ChainMap, Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quintsched.runtime.user_objects.find_impure_code import asking_elsewhere, has_known_content
from quintsched.runtime.user_objects.host_value_equality import state_of
from quintsched.runtime.user_objects.library_or_user import is_library_module

X = torch.ones(2, 4, requires_grad=True)
EVENT, VARIABLE = threading.Event(), contextvars.ContextVar("variable", default=1)
LOGGER = logging.getLogger(__name__)


@dataclass
class Options:
    rate: float = 1.0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0]


def tell() -> bool:
    LOGGER.info("told")
    return True


ASKS: dict[str, Callable[[], object]] = {
    "os.environ": lambda: os.environ.get("A"),
    "os.getenv": lambda: list(map(os.getenv, ["A"])),
    "time.time": lambda: sorted([1], key=lambda _: time.time()),
    "io.open": lambda: open("/dev/null").close(),
    "_contextvars.ContextVar.get": VARIABLE.get,
    "threading.Event.is_set": lambda: EVENT.is_set(),
    "eval": lambda: eval("1"),
    "torch.get_default_dtype": lambda: torch.get_default_dtype(),
    "torch.is_autocast_enabled": lambda: torch.is_autocast_enabled(),
    "torch.backends.ContextProp": lambda: torch.backends.cudnn.benchmark,
    "torch.are_deterministic_algorithms_enabled": lambda: torch.are_deterministic_algorithms_enabled(),
    "torch.random.initial_seed": lambda: torch.initial_seed(),
}
PLAIN: list[Callable[[], object]] = [
    lambda: Doubled.apply(X).relu().sum().backward(),
    lambda: F.gelu(F.layer_norm(nn.Linear(4, 4)(X), (4,))),
    lambda: (torch.zeros(2).uniform_(), torch.finfo(X.dtype).max, torch.device("cpu"), X.to(torch.float64)),
    lambda: torch.autocast("cpu", torch.bfloat16).__enter__().__exit__(None, None, None),
    lambda: (torch.is_grad_enabled(), torch.func.vmap(torch.sin)(X), torch.compiler.is_compiling()),
    lambda: (replace(Options(), rate=2.0), functools.reduce(operator.add, [1, 2]), random.random(), np.sqrt(2.0)),
    lambda: (tell(), sorted({1: 2}), getattr(X, "shape", None), time.sleep(0)),
]


def test_what_is_asked_elsewhere_is_heard() -> None:
    for name, ask in ASKS.items():
        with asking_elsewhere() as found:
            ask()
        said = found[0].removeprefix("_" if name == "io.open" else "").removeprefix(name)  # Python 3.12 has it in _io
        assert said.startswith(" (test_plain_code.py, line ")


def test_plain_code_is_not() -> None:
    before = sys.getprofile()
    with asking_elsewhere() as found:
        for function in PLAIN:
            function()
    assert found == []
    assert sys.getprofile() is before


def test_masked_arrays_are_compared_with_what_is_masked() -> None:
    array = np.ma.array([1.0, 2.0], mask=[False, True])
    read, masked = state_of(array), state_of(np.ma.masked)
    assert masked() == masked()
    before = read()
    array.mask = [True, False]
    assert read() != before


def test_objects_of_unknown_content_are_told_by_their_kinds() -> None:
    values = [1.5, "a", (1,), [1], {1: 2}, {3}, deque(), Counter(), ChainMap(), Options(), SimpleNamespace(), len]
    tensors = [X, nn.Linear(1, 1), np.zeros(2), np.float32(1), torch.float32, torch.ops.aten.add, torch, F.gelu]
    others = [np.random.default_rng(0), random.Random(0), Options, functools.partial(max), itertools.count(), LOGGER]
    known = [*values, *tensors, *others, vars(inspect.ArgInfo)["args"]]
    assert [thing for thing in known if not has_known_content(thing)] == []
    buffers = [array.array("i"), bytearray(), ctypes.c_int(0), memoryview(b"")]
    held = [weakref.ref(Options), iter([1]), VARIABLE, threading.Lock(), operator.attrgetter("a")]
    unknown = [*buffers, *held, functools.lru_cache(print), torch.optim.SGD([X]), (one for one in [1])]
    assert [thing for thing in unknown if has_known_content(thing)] == []


def test_packages_are_libraries_wherever_pip_has_put_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("put_there", "written_here"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
        (folder / f"{name}.py").write_text("")
        __import__(name)
    (tmp_path / "put_there" / "put_there-1.0.dist-info").mkdir()
    assert is_library_module("put_there")
    assert not is_library_module("written_here")
