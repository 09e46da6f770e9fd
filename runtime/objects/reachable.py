"""The objects that a loader consists of and that its code names: among them are the generators that it draws from.

    object      attributes, in __dict__ or __slots__; its class
    class       attributes and methods, along the mro               ┐ but for those of torch, numpy,
    function    closure, defaults, the globals that its code names  ┘ Python and installed packages
    container   its entries, if these are few: those of data are not looked at

Nothing of a user's is called for it: no property, no `__getattr__`, no iterator.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
from torch import Tensor, nn

from .user_code import is_library_module, is_of_library, names_of

_MOST, _DEEPEST = 2000, 12
"""So many objects are looked at, so far from the loader."""

_LONGEST, _ATTRIBUTES = 64, 1000
"""So many entries a container may have, or none are looked at; so many attributes of an object are."""

_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), Tensor, np.ndarray, ModuleType, CodeType)
_OMITTED = "_iterator"
"""Where torch's DataLoader keeps its workers."""


def reachable(holders: Iterable[Any]) -> Iterator[Any]:
    """Yield holders and what they reach, each once, the nearer ones first, in the same order in every process."""
    seen: dict[int, Any] = {}
    level = list(holders)
    for _ in range(_DEEPEST):
        below: deque[Any] = deque()
        for thing in level:
            if isinstance(thing, _LEAVES) or id(thing) in seen:
                continue
            if len(seen) == _MOST:
                return
            seen[id(thing)] = thing
            yield thing
            below.extend(parts_of(thing))
        level = list(below)


def parts_of(thing: Any) -> Iterable[Any]:
    """Return what a thing holds or names."""
    if isinstance(thing, type):
        return _of_class(thing)
    if isinstance(thing, FunctionType):
        return _of_function(thing)
    if isinstance(thing, MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, BuiltinMethodType):
        return [thing.__self__]
    if isinstance(thing, staticmethod | classmethod):
        return [thing.__func__]
    if isinstance(thing, property):
        return [thing.fget]
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        return [] if frame is None else [*frame.f_locals.values(), *_named(frame.f_globals, names_of(thing.gi_code))]
    called = [thing.func, *thing.args, *thing.keywords.values()] if isinstance(thing, partial) else []
    return chain(called, _entries(thing), _attributes(thing), [type(thing)])


def _of_class(kind: type) -> Iterable[Any]:
    own = [base for base in kind.__mro__ if not is_of_library(base)]
    return [value for base in own for value in islice(vars(base).values(), _ATTRIBUTES)]


def _of_function(function: FunctionType) -> Iterable[Any]:
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]
    if is_of_library(function):
        return held
    named = _named(function.__globals__, names_of(function.__code__))
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*held, *given, *vars(function).values(), *named]


def _named(space: Mapping[str, Any], names: Iterable[str]) -> Iterator[Any]:
    """Yield the globals of these names, and what modules of the user's have under them."""
    names, spaces, seen = list(dict.fromkeys(names)), [space], set()
    for some in spaces:
        for name in names:
            found = some.get(name, sys.modules.get(name) if some is space else None)
            if not isinstance(found, ModuleType):
                yield found
            elif id(found) not in seen and not is_library_module(found.__name__):
                seen.add(id(found))
                spaces.append(vars(found))


def _entries(thing: Any) -> Iterable[Any]:
    """Return the entries of a short container; those of an own kind are read as its base does."""
    if isinstance(thing, dict) and dict.__len__(thing) <= _LONGEST:
        return (OrderedDict if isinstance(thing, OrderedDict) else dict).values(thing)
    if isinstance(thing, list) and list.__len__(thing) <= _LONGEST:
        return list.__iter__(thing)
    if isinstance(thing, tuple) and tuple.__len__(thing) <= _LONGEST:
        return tuple.__iter__(thing)
    return islice(thing._modules.values(), _ATTRIBUTES) if isinstance(thing, nn.Module) else ()


def _attributes(thing: Any) -> Iterator[Any]:
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        held = None
    if isinstance(held, dict):
        yield from (value for name, value in islice(held.items(), _ATTRIBUTES) if name != _OMITTED)
    for base in type(thing).__mro__:
        for slot in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(slot, MemberDescriptorType):
                try:
                    yield slot.__get__(thing)
                except AttributeError:  # nothing is there yet
                    continue
