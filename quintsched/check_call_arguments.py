"""Arguments of public functions, checked where they come in: a wrong one is named, and the right call is shown.

    @takes("run_local(4, function)", world_size=WHOLE, fn=FUNCTION)
    def run_local(world_size, fn): …

    run_local(function, 4)  ─▶  run_local: world_size is a function; give a whole number: run_local(4, function)

Only the kind of an argument is judged here. What may be missing may be None.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from quintsched.errors import UsageError, printable, quoted

Taken = ParamSpec("Taken")
Argument = TypeVar("Argument")


@dataclass(frozen=True)
class ArgumentKind:
    """Requirement on an argument: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def instance(words: str, *kinds: type) -> ArgumentKind:
    """Return the kind of instances of some classes."""
    return ArgumentKind(words, lambda value: isinstance(value, kinds))


def ours(name: str, words: str = "") -> ArgumentKind:
    """Return the kind of instances of a class of this package, by its name: nothing is imported for it."""

    def holds(value: object) -> bool:
        return name in [kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("quintsched.")]

    return ArgumentKind(words or f"{_article(name)} {name}", holds)


def _is_whole(value: object) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


WHOLE_NUMBER = ArgumentKind("a whole number", _is_whole)
COUNT = ArgumentKind("a whole number from 1", lambda value: _is_whole(value) and value >= 1)
NUMBER = ArgumentKind(
    "a number", lambda value: (isinstance(value, Real) or _is_whole(value)) and not isinstance(value, bool)
)
PLAN = ours("PlanData", "a Plan, as quintsched.compile or Plan.load returns it")
FLAG = instance("True or False", bool)
TEXT = instance("text", str)
PATH = instance("a path", str, os.PathLike)
FUNCTION = ArgumentKind("a function", callable)
MAPPING = instance("a mapping", Mapping)
ROW = ArgumentKind(
    "a list", lambda value: hasattr(value, "__len__") and hasattr(value, "__getitem__") and not _is_text(value)
)
SEVERAL = ArgumentKind("a list", lambda value: hasattr(value, "__iter__") and not isinstance(value, str | bytes))


def items(words: str, kind: ArgumentKind, of: ArgumentKind = ROW) -> ArgumentKind:
    """Return the kind of lists, or of what `of` says, whose items are of a kind; those of an iterator are not read."""
    return ArgumentKind(words, lambda value: of.holds(value) and (iter(value) is value or all(map(kind.holds, value))))


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes | Mapping)


def takes(call: str, **kinds: ArgumentKind) -> Callable[[Callable[Taken, Argument]], Callable[Taken, Argument]]:
    """Check arguments of a function, or of a class's `__init__`, by their names; `call` is how it is called.

    The decorated function raises `UsageError` for an argument of another kind, one that is missing, and one that there
    is not. None passes where it is the default.
    """

    def decorate(function: Callable[Taken, Argument]) -> Callable[Taken, Argument]:
        signature = inspect.signature(function)
        assert kinds.keys() <= signature.parameters.keys()
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: Taken.args, **options: Taken.kwargs) -> Argument:
            try:
                given = signature.bind(*args, **options).arguments
            except TypeError as error:
                raise UsageError(f"{name}: {error}; write {call}") from None
            for argument, value in given.items():
                kind = kinds.get(argument)
                if kind and not (kind.holds(value) or value is signature.parameters[argument].default is None):
                    raise UsageError(f"{name}: {argument} is {shown(value)}; give {kind.words}: {call}")
            return function(*args, **options)

        return checked

    return decorate


def called_as(call: str) -> Callable[[Callable[Taken, Argument]], Callable[Taken, Argument]]:
    """Raise `UsageError` where arguments of a method are missing or unknown; a right call costs one frame."""

    def decorate(function: Callable[Taken, Argument]) -> Callable[Taken, Argument]:
        @wraps(function)
        def called(*args: Taken.args, **options: Taken.kwargs) -> Argument:
            try:
                return function(*args, **options)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # within the function
                raise UsageError(f"{error}; write {call}") from None

        return called

    return decorate


def shown(value: object) -> str:
    """Return an argument as a message names it: text and numbers as they are, all else by what it is."""
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return printable(quoted(value))
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    name = "function" if inspect.isroutine(value) else type(value).__name__
    return f"{_article(name)} {name}"


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOaeio" else "a"
