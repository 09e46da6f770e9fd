"""Values of host state: equality, state of generators and arrays, digests of tensors, and names of operators."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from io import BytesIO, StringIO
from itertools import count
from operator import attrgetter, methodcaller
from random import Random, SystemRandom
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .library_or_user import PLAIN_TYPES

_MOST_BYTES = 1 << 20
"""Size limit, in bytes, of arrays and tensors that are digested."""

GONE: Any = object()
"""Sentinel for a place that is empty now."""

INSTEAD = "quintsched_"
"""Prefix of names that this package registers in place of library functions of the same behaviour."""

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
OPERATORS = (
    *(f"{kind}{name}" for name in _BINARY for kind in ("", "r", "i")),
    *("neg", "pos", "abs", "invert", "lt", "le", "eq", "ne", "gt", "ge", "bool", "len", "iter", "next", "contains"),
    *("getitem", "setitem", "call", "float", "int", "index", "str", "repr", "format", "getattr", "enter", "exit"),
)
"""Stems of special methods that syntax calls without naming them."""


def is_same(now: Any, seen: Any) -> bool:
    """Return whether two values are the same: identical, or equal plain values, or tuples of these."""
    if now is seen or type(now) is not type(seen):
        return now is seen
    if isinstance(now, tuple):
        return len(now) == len(seen) and all(map(is_same, now, seen))
    return isinstance(now, PLAIN_TYPES) and bool(now == seen) and (bool(now) or repr(now) == repr(seen))


def state_of(thing: Any, most_bytes: int = _MOST_BYTES) -> Callable[[], Any] | None:
    """Return a function that reads a generator's state or a short array's content; None for other objects."""
    kind = _kind_of(thing)
    is_long = isinstance(thing, np.ndarray) and thing.nbytes > most_bytes
    return None if kind is None or is_long else partial(kind.read, thing)


def putter_of(thing: Any) -> Callable[[], Any] | None:
    """Return a function that restores a generator or array to its present state; None for other objects."""
    kind = _kind_of(thing)
    is_fixed = isinstance(thing, np.ndarray) and not thing.flags.writeable
    return None if kind is None or kind.put is None or is_fixed else partial(kind.put, thing, kind.get(thing))


class _TypeAccess(NamedTuple):
    """Access to the state of a type: `read` to compare it, `get` to copy it, `put` to restore it (None: impossible)."""

    read: Callable[[Any], Any]
    get: Callable[[Any], Any] = repr
    put: Callable[[Any, Any], Any] | None = None


def _kind_of(thing: Any) -> _TypeAccess | None:
    if not isinstance(thing, _STATEFUL) or isinstance(thing, SystemRandom):
        return None
    return next(known for kind, known in _KINDS if isinstance(thing, kind))


def bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of an array, and of its mask."""
    masked = np.ndarray.tobytes(np.ma.getmaskarray(array)) if isinstance(array, np.ma.MaskedArray) else b""
    return np.ndarray.tobytes(array) + masked


def numbers_of(tensor: Tensor) -> str | None:
    """Return a digest of a small plain CPU tensor, which NumPy may write without its version counter; else None."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or not 0 < tensor.nbytes <= _MOST_BYTES:
        return None
    # a copy, since numpy fixes the size of a storage, which ZeRO-3 frees
    return _digest(tensor.detach().flatten().clone().view(torch.uint8).numpy().tobytes())


def marks_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on a plain tensor or parameter."""
    own = vars(tensor) if type(tensor) in (Tensor, nn.Parameter) else {}
    return {key: value for key, value in own.items() if not key.startswith("_quintsched")}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def without_numbers(value: Any) -> Any:
    """Return a value with the class Tensor in place of each tensor."""
    if isinstance(value, Tensor):
        return Tensor
    return tuple(map(without_numbers, value)) if type(value) is tuple else value


def _set_all(held: Any, now: Any) -> None:
    held[:] = now


def _content_of(file: StringIO | BytesIO) -> tuple[str | bytes, int] | None:
    """Return the content of an in-memory file, and its position; None: it was closed."""
    return None if file.closed else (file.getvalue(), file.tell())


def _write_again(file: Any, now: tuple[str | bytes, int] | None) -> None:
    if now is not None and not file.closed:
        file.seek(0)
        file.truncate()
        file.write(now[0])
        file.seek(now[1])


def _held_by(variable: ContextVar[Any]) -> Any:
    """Return the value of a context variable in this context."""
    return variable.get(GONE)


def _set_again(variable: ContextVar[Any], now: Any) -> None:
    """Restore a context variable: to its default if it was not set; without a default, it stays as it is."""
    with suppress(LookupError):
        variable.set(Context().run(variable.get) if now is GONE else now)


_OF_FILES = _TypeAccess(lambda one: hash(_content_of(one)), _content_of, _write_again)

_KINDS: tuple[tuple[type, _TypeAccess], ...] = (
    (count, _TypeAccess(repr)),
    (ContextVar, _TypeAccess(_held_by, _held_by, _set_again)),
    (
        Random,
        _TypeAccess(lambda one: hash(one.getstate()), methodcaller("getstate"), lambda one, now: one.setstate(now)),
    ),
    (
        np.random.RandomState,
        _TypeAccess(lambda one: repr(one.get_state()), methodcaller("get_state"), lambda one, now: one.set_state(now)),
    ),
    (
        torch.Generator,
        _TypeAccess(
            lambda one: _digest(one.get_state().numpy().tobytes()),
            methodcaller("get_state"),
            lambda one, now: one.set_state(now),
        ),
    ),
    (
        np.random.Generator,
        _TypeAccess(
            lambda one: str(one.bit_generator.state),
            attrgetter("bit_generator.state"),
            lambda one, now: setattr(one.bit_generator, "state", now),
        ),
    ),
    (np.ndarray, _TypeAccess(lambda one: _digest(bytes_of(one)), lambda one: one.copy(), np.copyto)),
    (array, _TypeAccess(lambda one: _digest(one.tobytes()), lambda one: one[:], _set_all)),
    (bytearray, _TypeAccess(lambda one: _digest(bytes(one)), bytes, _set_all)),
    (StringIO, _OF_FILES),
    (BytesIO, _OF_FILES),
)
_STATEFUL = tuple(kind for kind, _ in _KINDS)
