"""Digests of user functions and modules, to compare them between ranks: bytecode, and the plain values that it reads.

    def loss(output, targets):                code     a digest, wherever the function is defined
        return mse(output, targets) * SCALE   reads    SCALE = 2.0; mse: its code; closures, defaults, attributes

Library functions are compared by name: their versions are compared elsewhere. Values that by their names belong to one
rank (RANK, device, log_dir, …) are left out.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from .library_or_user import PLAIN_TYPES, is_of_library, names_of
from .object_contents import ClosureCells, stands_for

_OF_A_RANK = frozenset({"rank", "world", "device", "gpu", "host", "hostname", "node", "local", "main", "master"}) | {
    *("leader", "process", "pid", "port", "address", "path", "dir", "file", "folder", "time", "start", "log", "verbose")
}
"""Words that mark a value as a rank's own: it may differ from rank to rank."""

_MOST = 1000
"""Functions and values of one object that are read at most."""

_DIGITS = 16


@dataclass(frozen=True)
class Described:
    """Description of a function or module: `what`, its name, settings and code digest; `read`, names → plain values."""

    what: str
    read: Mapping[str, str]


def describe_function(function: Any) -> Described:
    """Return the description of a function or callable object; plain attributes of an object are part of `what`."""
    if isinstance(function, functools.partial):
        of_function = describe_function(function.func)
        given = ", ".join(
            f"{name}={value!r}" for name, value in function.keywords.items() if isinstance(value, PLAIN_TYPES)
        )
        return Described(f"{of_function.what} with {given}", of_function.read)
    found = _CodeReader()
    if isinstance(function, MethodType):
        found.read_object(type(function.__self__).__qualname__, function.__self__)
        function = function.__func__
    if isinstance(function, FunctionType):
        found.read_function(function)
        return Described(f"{function.__qualname__}{found.code()}", found.values)
    if isinstance(function, type) or not hasattr(function, "__dict__"):
        return Described(str(getattr(function, "__qualname__", type(function).__qualname__)), {})
    found.read_class(type(function))
    return Described(f"{type(function).__qualname__}({_settings_of(function)}){found.code()}", found.values)


def describe_module(module: nn.Module) -> Described:
    """Return the description of a module without submodules and weights; attributes of library modules are included."""
    found, kind = _CodeReader(), type(module)
    found.read_class(kind)
    for number, hook in enumerate((*module._forward_hooks.values(), *module._forward_pre_hooks.values())):
        found.read_value(f"hook {number}", hook)
    if is_of_library(kind):
        return Described(f"{kind.__name__} {_settings_of(module)}{found.code()}", found.values)
    found.read_object("", module)
    return Described(f"{kind.__name__}{found.code()}", found.values)


def _settings_of(holder: object) -> str:
    """Return the plain public attributes of an object as "name=value, …"."""
    found = {
        name: value
        for name, value in sorted(vars(holder).items())
        if not name.startswith("_") and name != "training" and isinstance(value, PLAIN_TYPES) and value is not None
    }
    return ", ".join(f"{name}={value!r}" for name, value in found.items())


class _CodeReader:
    """Reader of one object: collects the code of its functions, and plain values by name."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._codes: list[str] = []
        self._seen: set[int] = set()

    def code(self) -> str:
        """Return a digest of all code that was read, in brackets; "" if there was none."""
        if not self._codes:
            return ""
        return f" ({hashlib.sha256(chr(10).join(self._codes).encode()).hexdigest()[:_DIGITS]})"

    def read_class(self, kind: type) -> None:
        """Read the methods of a class and of its bases, up to library classes."""
        for base in kind.__mro__:
            if is_of_library(base):
                continue
            for name, value in sorted(vars(base).items()):
                if isinstance(own := stands_for(value), FunctionType):
                    self.read_function(own)
                elif isinstance(value, PLAIN_TYPES) and not name.startswith("__"):
                    self._note(f"{base.__qualname__}.{name}", value)

    def read_object(self, name: str, holder: object) -> None:
        """Read the plain public attributes of an object, and those that are functions."""
        for key, value in sorted(vars(holder).items()):
            if not key.startswith("_") and key != "training" and not _is_of_rank(key):
                self.read_value(f"{name}.{key}".lstrip("."), value)

    def read_value(self, name: str, value: Any) -> None:
        """Read a value that code refers to by a name."""
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, PLAIN_TYPES):
            self._note(name, value)
        elif isinstance(value, functools.partial):
            self.read_value(name, value.func)
            for key, given in value.keywords.items():
                self.read_value(f"{name}, {key}", given)
        elif (
            isinstance(value, list | tuple) and len(value) <= _DIGITS and all(isinstance(x, PLAIN_TYPES) for x in value)
        ):
            self._note(name, value)
        elif callable(value) and hasattr(value, "__name__"):
            self._note(name, getattr(value, "__qualname__", value.__name__))
            self.read_function(value)

    def read_function(self, function: Any) -> None:
        """Read a user function: its code, and the globals, closure variables and defaults that it reads."""
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or id(function) in self._seen or len(self._seen) > _MOST:
            return
        self._seen.add(id(function))
        if is_of_library(function):
            return
        self._codes.append(repr(_code(function.__code__)))
        elsewhere = function.__globals__
        by_name = [
            *ClosureCells(function).read_values().items(),
            *((n, elsewhere[n]) for n in names_of(function.__code__) if n in elsewhere),
        ]
        for name, value in (
            *((f"{function.__qualname__}, {name}", value) for name, value in (function.__kwdefaults__ or {}).items()),
            *((f"{function.__qualname__}, default {k}", value) for k, value in enumerate(function.__defaults__ or ())),
            *((name, value) for name, value in by_name if not _is_of_rank(name)),
        ):
            self.read_value(name, value)

    def _note(self, name: str, value: object) -> None:
        if len(self.values) < _MOST:
            self.values[name] = value if isinstance(value, str) else repr(value)


def _is_of_rank(name: str) -> bool:
    return not _OF_A_RANK.isdisjoint(re.split(r"[\W_\d]+", name.lower()))


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return bytecode, names and constants of a code object, independent of file and line."""
    return code.co_code, code.co_names, [_constant(constant) for constant in code.co_consts]


def _constant(constant: object) -> Any:
    if isinstance(constant, CodeType):
        return _code(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
