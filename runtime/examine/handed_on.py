"""Values that code hands on through objects: which block reads what a block of another stage has set, or the loss does.

    layer 0    ctx.h0 = h          stage 0's     ┐ a mark in its place tells whether it is read; a loss is asked by
    layer 3    h + ctx.h0          stage 1's own ┘ the names that its code loads

A mark ends the run of a block that uses it, whatever the code does with it.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..objects.host_values import OPERATORS
from ..objects.snapshot import Snapshot
from ..objects.user_code import codes_in, is_of_library


class MarkRead(BaseException):
    """Ends the run of a block that reads a mark; no `except Exception` of its own catches it."""


class ReadMark:
    """Stands where a value is that another stage has: that of block `setter`."""

    def __init__(self, setter: int) -> None:
        self.setter, self.is_read = setter, False

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in Snapshot({"": (args, tuple((kwargs or {}).values()))}, numbers=False).values():
            if isinstance(value, ReadMark):
                value.is_read = True
        raise MarkRead


def _read(self: ReadMark, *_: Any) -> Any:
    object.__setattr__(self, "is_read", True)
    raise MarkRead


for _operator in OPERATORS:
    setattr(ReadMark, f"__{_operator}__", _read)


class Reads:
    """The names that a function's code loads, and the ids of what it reaches.

    Args:
        function: a loss or a metric; of modules that it holds the forwards do not count.
    """

    def __init__(self, function: Any) -> None:
        snapshot = Snapshot({"": function}, numbers=False)
        self.held = {token for _, token in snapshot.holders()}
        waiting = [f for f in snapshot.values() if isinstance(f, FunctionType) and not is_of_library(f)]
        own = _function_of(function)
        self.names = set(_loaded(own.__code__)) if own is not None else set[str]()
        while called := [f for f in waiting if f is not own and f.__name__ in {*self.names, "<lambda>"}]:
            waiting = [f for f in waiting if f not in called]
            self.names.update(name for f in called for name in _loaded(f.__code__))


def _function_of(thing: Any) -> FunctionType | None:
    """Return the code that a call of something begins with, if it is a user's."""
    while isinstance(thing, partial):
        thing = thing.func
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if not isinstance(thing, FunctionType):
        thing = getattr(type(thing), "forward" if isinstance(thing, nn.Module) else "__call__", None)
    return thing if isinstance(thing, FunctionType) and not is_of_library(thing) else None


def _loaded(function: CodeType) -> Iterator[str]:
    """Yield the names that code looks up, and the strings in it, but for those of what it sets alone."""
    for code in codes_in(function):
        steps = [*dis.get_instructions(code)]
        for step, after in pairwise([*steps, steps[-1]]):
            is_text = isinstance(step.argval, str) and step.opname == "LOAD_CONST"
            if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")) or (
                is_text and not after.opname.startswith(("STORE_", "DELETE_"))
            ):
                yield str(step.argval)
