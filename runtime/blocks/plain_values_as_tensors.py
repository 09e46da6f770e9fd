"""Exact serialisation of plain Python values as named tensors, for files that hold tensors only.

    name: {"k": 3, "sum": 0.1, "history": [tensor, tensor]}
     ──▶ name#   uint8, JSON:  {"dict": [["k", 3], ["sum", {"float": "0x1.999999999999ap-4"}], …]}
         name#0  the first tensor
         name#1  the second

Types are kept (an int is no tensor, a tuple no list), and floats keep every bit. A tensor that occurs twice is one
object again when it is read. `known` tensors are those that the reader already has, written as references by name.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor, nn

from quintsched.errors import InputError
from quintsched.files.strictjson import parse_strict

TEXT = "#"
"""Suffix of the name of a value's JSON; in names of the value's tensors, a number follows it."""

_DEEPEST = 40
_FACTORIES = MappingProxyType({"int": int, "float": float, "list": list, "dict": dict, "set": set})
_SEQUENCES = MappingProxyType({"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque})

NameOf = Callable[[Tensor], "str | None"]
"""Maps a tensor that the reader already has to its reference; any other to None."""

TensorOf = Callable[[str], Tensor]
"""Maps a reference to the tensor that it stands for."""


class NotPlainError(Exception):
    """Raised for a value that is not plain data; the message has its type and its path within the whole."""


def quoted(key: str) -> str:
    """Return a key percent-encoded as one component of a dotted name: without dots and other separators."""
    return quote(key, safe="").replace(".", "%2E")


def unquoted(part: str) -> str:
    """Return the key that `quoted` encoded."""
    return unquote(part)


def is_text(name: str) -> bool:
    """Whether the tensor of this name holds a value's JSON."""
    return name.endswith(TEXT)


def pack(name: str, value: object, name_of: NameOf = lambda tensor: None) -> dict[str, Tensor]:
    """Serialise a value as named tensors; raises `NotPlainError` for other than plain data."""
    packer = _Packer(name, name_of)
    text = json.dumps(packer.words(value, "", 0), separators=(",", ":")).encode()
    return {f"{name}{TEXT}": torch.frombuffer(bytearray(text), dtype=torch.uint8), **packer.tensors}


def unpack(
    name: str, found: Mapping[str, Tensor], device: torch.device | None = None, tensor_of: TensorOf | None = None
) -> Any:
    """Return the value that `pack` serialised, its tensors as copies; raises `InputError` for damaged data.

    Args:
        name: the name it was packed under.
        found: the tensors, by name.
        device: target of tensors that were not on the CPU.
        tensor_of: resolves references to tensors that were known.
    """
    text = found[f"{name}{TEXT}"].detach().cpu().numpy().tobytes()
    try:
        return _Unpacker(name, found, device, tensor_of).value(parse_strict(text))
    except InputError as error:
        raise InputError(f"{name!r}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{name!r}: no value that was saved by quintsched ({type(error).__name__}: {error})") from None


class _Packer:
    """Encoder of values as JSON, which collects their tensors."""

    def __init__(self, name: str, name_of: NameOf) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name, self._name_of = name, name_of
        self._numbers: dict[int, int] = {}

    def words(self, value: object, place: str, depth: int) -> object:
        """Return the JSON for a value; `place` is its path within the whole, `depth` its nesting."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if depth > _DEEPEST:
            raise NotPlainError(f"{place} is nested too deeply, or holds itself")
        if kind in _SCALARS:
            return {kind.__name__: _SCALARS[kind][0](value)}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"numpy": [value.dtype.str, value.tobytes().hex()]}
        if kind in _SEQUENCES.values():
            return self._sequence(value, place, depth)
        if kind in (dict, OrderedDict, defaultdict):
            return self._pairs(value, place, depth)
        raise NotPlainError(f"{place or 'it'} is a {kind.__module__}.{kind.__qualname__}")

    def _sequence(self, value: Any, place: str, depth: int) -> object:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        words: list[object] = [self.words(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(items)]
        return {type(value).__name__: [value.maxlen, words] if type(value) is deque else words}

    def _pairs(self, value: Any, place: str, depth: int) -> object:
        pairs = [
            [self.words(key, f"a key of {place}", depth + 1), self.words(item, f"{place}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        if type(value) is defaultdict:
            factory = next((name for name, made in _FACTORIES.items() if made is value.default_factory), None)
            if factory is None:
                raise NotPlainError(f"{place or 'it'} is a defaultdict of {value.default_factory!r}")
            return {"defaultdict": [factory, pairs]}
        return {type(value).__name__: pairs}

    def _tensor(self, tensor: Tensor, place: str) -> object:
        known = self._name_of(tensor)
        if known is not None:
            return {"known": known}
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            kind = nn.Parameter if isinstance(tensor, nn.Parameter) else type(tensor)
            raise NotPlainError(f"{place or 'it'} is a {kind.__module__}.{kind.__qualname__}, {tensor.layout}")
        if tensor.requires_grad:
            raise NotPlainError(f"{place or 'it'} is a tensor that requires a gradient")
        number = self._numbers.setdefault(id(tensor), len(self._numbers))
        self.tensors[f"{self._name}{TEXT}{number}"] = tensor
        return {"tensor": [number, tensor.device.type]}


class _Unpacker:
    """Decoder of values from JSON and tensors."""

    def __init__(
        self, name: str, found: Mapping[str, Tensor], device: torch.device | None, tensor_of: TensorOf | None
    ) -> None:
        self._name, self._found, self._device, self._tensor_of = name, found, device, tensor_of
        self._made: dict[int, Tensor] = {}

    def value(self, words: Any) -> Any:
        """Return the value that JSON encodes."""
        if not isinstance(words, dict):
            return words
        ((kind, said),) = words.items()
        if kind == "tensor":
            return self._tensor(*said)
        if kind == "known" and self._tensor_of is not None:
            return self._tensor_of(said)
        if kind == "deque":
            return deque(map(self.value, said[1]), said[0])
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(self.value, said))
        if kind in ("dict", "OrderedDict"):
            return {"dict": dict, "OrderedDict": OrderedDict}[kind](self._pairs(said))
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[said[0]], self._pairs(said[1]))
        if kind == "numpy":
            return np.frombuffer(bytes.fromhex(said[1]), np.dtype(said[0]))[0]
        read = next((read for known, (_, read) in _SCALARS.items() if known.__name__ == kind), None)
        if read is None:
            raise InputError(f"{kind!r} is no kind of value")
        return read(said)

    def _pairs(self, said: Iterable[Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in said]

    def _tensor(self, number: int, device: str) -> Tensor:
        if number not in self._made:
            tensor = self._found[f"{self._name}{TEXT}{number}"]
            goes = torch.device("cpu") if device == "cpu" or self._device is None else self._device
            self._made[number] = tensor.detach().to(goes, copy=True)
        return self._made[number]


def _type_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise InputError(f"{name!r} is no type of numbers")
    return found


_SCALARS: Mapping[type, tuple[Callable[[Any], object], Callable[[Any], Any]]] = MappingProxyType(
    {
        float: (lambda one: [one.hex()], lambda said: float.fromhex(said[0])),
        complex: (lambda one: [one.real.hex(), one.imag.hex()], lambda said: complex(*map(float.fromhex, said))),
        bytes: (bytes.hex, bytes.fromhex),
        torch.Size: (list, torch.Size),
        torch.dtype: (lambda one: str(one).removeprefix("torch."), _type_of),
        torch.device: (str, torch.device),
    }
)
"""Encoder and decoder of values that contain no others, by type."""
