"""Marks of what holders have, which tell whether it has changed: made before and behind code that may change it.

plain values   themselves                     tensors      which, how often written to, numbers of short ones
containers     their entries, how many        objects      which; of libraries, whether they are equal

Nothing that is marked is kept alive but containers and objects, until the marks are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from .host_values import numbers_of
from .spaces import CONTAINERS, LONGEST, Space
from .user_code import PLAIN, is_of_library

_MOST_BYTES, _MOST_NESTED = 1 << 16, 3
"""Larger arrays are looked at where it is due; values so deep."""


class _Version:
    """Which tensor something is, and how often it was written to. Another may have come where one is gone."""

    def __init__(self, tensor: Tensor, *, is_due: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._of, self.place = ref(tensor), id(tensor)
            self._version = 0 if tensor.is_inference() else tensor._version
            self._numbers = numbers_of(tensor) if is_due and tensor.nbytes <= _MOST_BYTES else None

    def __eq__(self, now: object) -> bool:
        return (
            isinstance(now, _Version)
            and (self.place, self._version, self._numbers) == (now.place, now._version, now._numbers)
            and self._of() is not None
        )


class Thing:
    """An object, or a container: it is the same, or has the same entries."""

    def __init__(self, thing: Any, depth: int) -> None:
        self.thing, self._depth = thing, depth

    def __eq__(self, now: object) -> bool:
        if not isinstance(now, Thing) or type(self.thing) is not type(now.thing):
            return False
        one, other = self.thing, now.thing
        if one is other:
            return True
        if type(one) in CONTAINERS and self._depth < _MOST_NESTED:
            return _entries_of(one, self._depth + 1) == _entries_of(other, self._depth + 1)
        if isinstance(one, np.ndarray):
            return one.shape == other.shape and bool(np.array_equal(one, other))
        with suppress(Exception):
            return is_of_library(type(one)) and not isinstance(one, Tensor | nn.Module) and bool(one == other)
        return False


Marks = Mapping[Any, Any]
"""What tells of the value under each key whether it has changed."""


class Holder(NamedTuple):
    """Something that has places.

    Attributes:
        space: where they are; said: returns what a place is called, by its name in the space.
        name: of the holder in a snapshot.
        is_module: whether they are attributes of a module.
        skipped: keys of what is not looked at.
    """

    space: Space
    said: Callable[[str], str]
    name: str
    is_module: bool
    skipped: frozenset[str] = frozenset()

    def marks(self, *, is_due: bool) -> Marks:
        """Return what tells whether it has changed; nothing for a large array unless it is due."""
        holder = self.space.holder
        if self.is_container:
            return _entries_of(holder)
        if isinstance(holder, np.ndarray) and holder.nbytes > _MOST_BYTES and not is_due:
            return {}
        return {
            key: mark_of(value, is_due=is_due) for key, value in self.space.read().items() if key not in self.skipped
        }

    @property
    def is_container(self) -> bool:
        """Whether the places are entries."""
        return self.space.form == "[{}]"

    def moved(self, was: Marks, now: Marks) -> tuple[list[str], dict[str, str]]:
        """Return the names of what is another now, and of what is where nothing was, with its numbers in words."""
        changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
        if not isinstance(self.space.holder, dict) and (None in changed or (self.is_container and len(changed) > 1)):
            return [self.said(self.name)], {}
        said = {key: self.said(self.space.label(self.name, key)) for key in changed}
        new = [key for key in changed if was.get(key) is None]
        values = self.space.read() if new else {}
        return [said[k] for k in changed if k not in new], {said[k]: _words_of(values.get(k)) for k in new}


def _words_of(value: Any) -> str:
    """Return what tells a number, or a small tensor's; empty for anything else."""
    if type(value) is Tensor:
        return numbers_of(value) or ""
    return repr(value) if isinstance(value, PLAIN) else ""


def mark_of(value: Any, depth: int = 0, *, is_due: bool = False) -> Any:
    """Return what tells whether a value is another later, or has been written to."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Version(value, is_due=is_due)
    if isinstance(value, tuple) and depth < _MOST_NESTED:
        return tuple(mark_of(part, depth + 1, is_due=is_due) for part in value[:LONGEST])
    return Thing(value, depth)


def _entries_of(container: Any, depth: int = 0) -> Marks:
    """Return marks of the entries of a container, and, but of a dict, of how many there are, under None."""
    if isinstance(container, set):
        return {None: (len(container), frozenset(entry for entry in container if isinstance(entry, PLAIN)))}
    if len(container) > LONGEST:
        is_dict = isinstance(container, dict)
        return {} if is_dict else {None: (len(container), *(mark_of(container[k], depth) for k in (0, -1)))}
    if isinstance(container, dict):
        return {key: mark_of(entry, depth) for key, entry in container.items()}
    return {None: len(container), **{k: mark_of(entry, depth) for k, entry in enumerate(container)}}


def tensors_of(mark: Any) -> Iterator[int]:
    """Yield the ids of tensors that a mark is of."""
    if isinstance(mark, tuple):
        for part in mark:
            yield from tensors_of(part)
    elif isinstance(mark, _Version):
        yield mark.place
