"""Values that code goes by on the host: whether two are one, what is in generators and arrays, and what words say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random, SystemRandom
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .user_code import PLAIN

_MOST_BYTES = 1 << 20
"""Arrays of at most so many bytes are looked at."""

GONE: Any = object()
"""Stands for what is no longer in a place."""

INSTEAD = "quintsched_"
"""Begins the names of what this package registers in place of libraries' own: it does the same as these."""

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
OPERATORS = (
    *(f"{kind}{name}" for name in _BINARY for kind in ("", "r", "i")),
    *("neg", "pos", "abs", "invert", "lt", "le", "eq", "ne", "gt", "ge", "bool", "len", "iter", "next", "contains"),
    *("getitem", "setitem", "call", "float", "int", "index", "str", "repr", "format", "getattr", "enter", "exit"),
)
"""Methods that are called without being named, but for their underscores."""


def is_same(now: Any, seen: Any) -> bool:
    """Whether two values are one: as all plain ones are that are equal, and tuples of them."""
    if type(now) is not type(seen):
        return False
    if isinstance(now, tuple):
        return len(now) == len(seen) and all(a is b or is_same(a, b) for a, b in zip(now, seen, strict=True))
    return isinstance(now, PLAIN) and bool(now == seen) and (bool(now) or repr(now) == repr(seen))


def state_of(thing: Any, most_bytes: int = _MOST_BYTES) -> Callable[[], Any] | None:
    """Return what reads where a generator is, or what is in a short array; None for anything else."""
    if isinstance(thing, count):
        return lambda: repr(thing)
    if isinstance(thing, SystemRandom):
        return None
    if isinstance(thing, Random):
        return lambda: hash(thing.getstate())
    if isinstance(thing, np.random.RandomState):
        return lambda: repr(thing.get_state())
    if isinstance(thing, torch.Generator):
        return lambda: _digest(thing.get_state().numpy().tobytes())
    if isinstance(thing, np.random.Generator):
        return lambda: str(thing.bit_generator.state)
    if isinstance(thing, np.ndarray) and thing.nbytes <= most_bytes:
        return lambda: _digest(bytes_of(thing))
    return None


def putter_of(thing: Any) -> Callable[[], Any] | None:
    """Return what sets a generator, or an array, as it is now; None for anything else."""
    if isinstance(thing, Random) and not isinstance(thing, SystemRandom):
        return partial(thing.setstate, thing.getstate())
    if isinstance(thing, np.random.RandomState):
        return partial(thing.set_state, thing.get_state())
    if isinstance(thing, torch.Generator):
        return partial(thing.set_state, thing.get_state())
    if isinstance(thing, np.random.Generator):
        return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    if isinstance(thing, np.ndarray) and thing.dtype != object and thing.flags.writeable:
        return partial(np.copyto, thing, thing.copy())
    return None


def bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    """Return what is in an array, and what of it is masked."""
    masked = np.ndarray.tobytes(np.ma.getmaskarray(array)) if isinstance(array, np.ma.MaskedArray) else b""
    return np.ndarray.tobytes(array) + masked


def numbers_of(tensor: Tensor) -> str | None:
    """Return a digest of what is in a short tensor of the CPU, which may be written past its version; None: of none."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or not 0 < tensor.nbytes <= _MOST_BYTES:
        return None
    return _digest(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())


def marks_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that users put on a plain tensor or parameter."""
    own = vars(tensor) if type(tensor) in (Tensor, nn.Parameter) else {}
    return {key: value for key, value in own.items() if not key.startswith("_quintsched")}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def without_numbers(value: Any) -> Any:
    """Return a value with a mark in place of tensors."""
    if isinstance(value, Tensor):
        return Tensor
    return tuple(map(without_numbers, value)) if type(value) is tuple else value
