"""Distinction of user code from library code, and the names and constants in code objects."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, TypeVar

PLAIN_TYPES = (bool, int, float, str, type(None))

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "quintsched"} - {"__main__"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_MOST_CLASSES = 4096

Result = TypeVar("Result")


def once_per_class(find: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Return a function of classes that computes its result once per class, by id: metaclasses may override hash."""
    known: dict[int, tuple[Any, Result]] = {}

    def look_up(kind: Any) -> Result:
        if id(kind) not in known:
            if len(known) > _MOST_CLASSES:
                known.clear()
            known[id(kind)] = kind, find(kind)
        return known[id(kind)][1]

    return look_up


def is_of_library(thing: Any) -> bool:
    """Return whether a class or function is of torch, the standard library, an installed package or this one."""
    return is_library_module(str(getattr(thing, "__module__", None) or ""))


def is_of_framework(thing: Any) -> bool:
    """Return whether a class or function is of torch, numpy, the standard library or this package."""
    return str(getattr(thing, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def is_ours(thing: Any) -> bool:
    """Return whether a class or function, or the function of a partial, is of this package."""
    return str(getattr(getattr(thing, "func", thing), "__module__", None)).startswith("quintsched.")


def is_library_module(name: str) -> bool:
    """Return whether the module of this name is of a library."""
    if name.partition(".")[0] in _LIBRARIES:
        return True
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return not _INSTALLED.isdisjoint(path.split(os.sep)) or path.startswith(_folders_of_pip(tuple(sys.path)))


@functools.lru_cache(maxsize=16)
def _folders_of_pip(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return those folders of `sys.path` into which packages were installed (`pip install --target`)."""
    folders = (path for path in paths if os.path.isdir(path))
    return tuple(
        os.path.join(path, "") for path in folders if any(name.endswith(".dist-info") for name in os.listdir(path))
    )


def arguments_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class by name; raise `ValueError` for C functions without a signature."""
    return inspect.signature(function).parameters


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def steps_in(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a code object, and of those nested in it."""
    return (step for one in codes_in(code) for step in dis.get_instructions(one))


def methods_of(kind: type) -> Iterator[FunctionType]:
    """Yield the functions in a user class, and in its bases, up to library classes."""
    spaces = (vars(base) for base in kind.__mro__ if not is_of_library(base))
    return (held for space in spaces for held in space.values() if isinstance(held, FunctionType))


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names that a code object, and those nested in it, use (`co_names`)."""
    return (name for one in codes_in(code) for name in one.co_names)


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> frozenset[str]:
    """Return the global names that a code object, and those nested in it, load or store: no attribute names."""
    return frozenset(step.argval for step in steps_in(code) if step.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME")))


def texts(code: CodeType) -> Iterator[str]:
    """Yield the strings in code, by which it may look up attributes."""
    return (text for text in constants_in(code) if isinstance(text, str))


def constants_in(code: CodeType) -> Iterator[Any]:
    """Yield the constants in a code object, and in those nested in it."""
    return (constant for one in codes_in(code) for constant in one.co_consts)
