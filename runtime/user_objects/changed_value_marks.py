"""Marks of the values in holders, compared before and after code runs, to detect which values it has changed.

plain values   the value                      tensors      identity, version counter, digest of small ones
containers     their entries and length       objects      identity; of libraries, equality

Marks keep alive only containers and objects, until the marks are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from .host_value_equality import numbers_of
from .library_or_user import PLAIN_TYPES, is_of_library
from .object_contents import CONTAINERS, LONGEST, HolderPlaces

_MOST_BYTES, _MOST_NESTED = 1 << 16, 3
"""Limits: bytes of an array that is compared at each check, not only when due; nesting depth of values."""


class _Version:
    """Identity and version counter of a tensor. Its id may be reused once the tensor is freed: then it is not equal."""

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
    """Mark of an object or container: equal to that of the same object, or of one with the same entries."""

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
"""Marks of the values under each key."""


class Holder(NamedTuple):
    """Object whose places are marked.

    Attributes:
        space: its places; said: returns the full name of a place, by its name in the space.
        name: of the holder in a snapshot.
        is_module: whether the places are attributes of a module.
        skipped: keys that are left out.
    """

    space: HolderPlaces
    said: Callable[[str], str]
    name: str
    is_module: bool
    skipped: frozenset[str] = frozenset()

    def marks(self, *, is_due: bool) -> Marks:
        """Return the marks of its values; none for a large array unless it is due."""
        holder = self.space.holder
        if self.is_container:
            return _entries_of(holder)
        if isinstance(holder, np.ndarray) and holder.nbytes > _MOST_BYTES and not is_due:
            return {}
        return {
            key: mark_of(value, is_due=is_due)
            for key, value in self.space.read_values().items()
            if key not in self.skipped
        }

    @property
    def is_container(self) -> bool:
        """Return whether the places are entries of a container."""
        return self.space.form == "[{}]"

    def moved(self, was: Marks, now: Marks) -> tuple[list[str], dict[str, str]]:
        """Return the names of changed values, and those of new values with their numbers in words."""
        changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
        if not isinstance(self.space.holder, dict) and (None in changed or (self.is_container and len(changed) > 1)):
            return [self.said(self.name)], {}
        said = {key: self.said(self.space.label(self.name, key)) for key in changed}
        new = [key for key in changed if was.get(key) is None]
        values = self.space.read_values() if new else {}
        return [said[k] for k in changed if k not in new], {said[k]: _words_of(values.get(k)) for k in new}


def _words_of(value: Any) -> str:
    """Return a number as text, or a digest of a small tensor; "" for other values."""
    if type(value) is Tensor:
        return numbers_of(value) or ""
    return repr(value) if isinstance(value, PLAIN_TYPES) else ""


def mark_of(value: Any, depth: int = 0, *, is_due: bool = False) -> Any:
    """Return the mark of a value: unequal to a later one if the value was replaced or written to."""
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, Tensor):
        return _Version(value, is_due=is_due)
    if isinstance(value, tuple) and depth < _MOST_NESTED:
        return tuple(mark_of(part, depth + 1, is_due=is_due) for part in value[:LONGEST])
    return Thing(value, depth)


def _entries_of(container: Any, depth: int = 0) -> Marks:
    """Return marks of a container's entries, and, except for dicts, of its length, under None."""
    if isinstance(container, set):
        return {None: (len(container), frozenset(entry for entry in container if isinstance(entry, PLAIN_TYPES)))}
    if len(container) > LONGEST:
        is_dict = isinstance(container, dict)
        return {} if is_dict else {None: (len(container), *(mark_of(container[k], depth) for k in (0, -1)))}
    if isinstance(container, dict):
        return {key: mark_of(entry, depth) for key, entry in container.items()}
    return {None: len(container), **{k: mark_of(entry, depth) for k, entry in enumerate(container)}}


def tensors_of(mark: Any) -> Iterator[int]:
    """Yield the ids of tensors in a mark."""
    if isinstance(mark, tuple):
        for part in mark:
            yield from tensors_of(part)
    elif isinstance(mark, _Version):
        yield mark.place
