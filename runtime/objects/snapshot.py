"""Snapshots of all that code can change on the host: to say what has changed since, by name, and to put it back.

    snapshot = Snapshot({"model": model})
    …                                       code runs that is only tried, or that may change nothing
    snapshot.changes()                      "model (Mixer).options['seen']", what it was, what it is
    snapshot.put_back()

    modules, plain objects   attributes, hooks, overridden forwards, however these are written        ┐
    dicts, lists, sets       entries; so of deques, and of what is in tuples                          │ of users' code
    classes, functions       attributes of classes; closures, defaults, and globals that code names   │ all of it, of
    tensors, arrays          numbers, by the versions that torch counts, and in place                 │ libraries'
    generators               where they are                                                           ┘ modules alone

Iterators cannot be put back. It serves all that is tried beside the training: splits, shapes, losses, and what
`parallel.proof` reads in blocks.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper, partial
from operator import is_
from random import Random, SystemRandom
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .host_values import bytes_of
from .user_code import PLAIN, globals_of, is_library_module, is_of_library, names_of

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_GONE: Any = object()
_LONGEST, _MOST, _MOST_BYTES = 1024, 100_000, 1 << 24
"""Entries of longer containers are not looked into, nor more things than so many, nor larger arrays."""


class Change(NamedTuple):
    """Something that is no longer what it was.

    Attributes:
        name: of it, in words.
        owner: the name of what holds it.
        place: the id of what holds it, and its key there.
        was, now: what it is; tensors that are the same one are compared with copies of their numbers.
    """

    name: str
    owner: str
    place: tuple[int, Any]
    was: Any
    now: Any


def label_in(root: nn.Module, path: str) -> str:
    """Return what a module is called in a snapshot of a root without a name."""
    return f"{path and f'.{path}'} ({type(root.get_submodule(path)).__name__})"


class _Held(NamedTuple):
    """A holder: the name, what it is, how its entries are read, what they were, and how one is set (gone: deleted)."""

    name: str
    holder: Any
    read: Callable[[], dict[Any, Any]]
    before: dict[Any, Any]
    put: Callable[[dict[Any, Any]], None]
    form: str


class Snapshot:
    """What roots hold and what their code names, as it is now.

    Args:
        roots: modules, functions and others, by what they are called in messages.
        numbers: whether those of tensors are noted; else nothing can be asked but who holds what.
    """

    def __init__(self, roots: Mapping[str, Any], *, numbers: bool = True) -> None:
        self._numbers = numbers
        self._seen: dict[int, Any] = {}
        self._held: list[_Held] = []
        self._empty: list[_Held] = []
        self._containers: list[Any] = []
        self._tensors: list[tuple[str, Tensor, int, Tensor, Tensor]] = []
        self._waiting = deque(roots.items())
        while self._waiting:
            self._look_into(*self._waiting.popleft())

    def changes(self) -> Iterator[Change]:
        """Yield what is not as it was, or, of tensors, has been written to."""
        for name, holder, read, before, _, form in self._filled():
            now = read()
            if not _is_same_dict(before, now):
                for key in [*before, *(key for key in now if key not in before)]:
                    was, found = before.get(key, _GONE), now.get(key, _GONE)
                    if not _is_same(was, found):
                        said = form.format(key if isinstance(key, PLAIN) else "…") if form else ""
                        was, found = (None if value is _GONE else value for value in (was, found))
                        yield Change(f"{name}{said}", name, (id(holder), key), was, found)
        for name, tensor, version, _, was in self._tensors:
            if tensor._version != version or _has_changed(tensor, version, was):
                yield Change(name, name, (id(tensor), None), was, tensor)

    def holders(self) -> Iterator[tuple[str, int]]:
        """Yield the names and ids of all that can be changed."""
        yield from ((held.name, id(held.holder)) for held in (*self._held, *self._empty))
        yield from ((name, id(tensor)) for name, tensor, *_ in self._tensors)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors, weights too, by their names, the nearer ones first."""
        weights = [(held.name, held.holder) for held in self._held if isinstance(held.holder, Tensor)]
        return weights + [(name, tensor) for name, tensor, *_ in self._tensors]

    def values(self) -> Iterator[Any]:
        """Yield all that was looked into."""
        return iter(self._seen.values())

    def put(self, owner: str, key: Any, value: Any) -> None:
        """Let what is held by this name have another value under a key, until all is put back."""
        found = [held for held in (*self._held, *self._empty) if held.name == owner]
        for held in sorted(found, key=lambda held: key not in held.before)[:1]:
            held.put({**held.before, key: value})

    def put_back(self) -> None:
        """Let all be as it was."""
        for _, tensor, version, memory, was in self._tensors:
            if _has_changed(tensor, version, was) and not tensor.is_meta:
                memory.copy_(was)
                if tensor.data_ptr() != memory.data_ptr():
                    tensor.data = memory
        for held in self._filled():
            if not _is_same_dict(held.before, held.read()):
                held.put(held.before)

    def _hold(self, name: str, holder: Any, read: Any, put: Any, form: str = ".{}") -> dict[Any, Any]:
        before: dict[Any, Any] = dict(read())
        held = _Held(name, holder, read, before, put, form)
        if not before and type(holder) in _CONTAINERS:  # hooks that a module does not have, for the most part
            self._empty.append(held)
            self._containers.append(holder)
        else:
            self._held.append(held)
        return before

    def _filled(self) -> list[_Held]:
        """Return what was not empty, or is no longer so."""
        return self._held + ([held for held in self._empty if held.holder] if any(self._containers) else [])

    def _enter(self, name: str, thing: Any) -> None:
        """Look into something, once."""
        if not isinstance(thing, PLAIN) and id(thing) not in self._seen and len(self._seen) < _MOST:
            self._seen[id(thing)] = thing
            self._waiting.append((name, thing))

    def _look_into(self, name: str, thing: Any) -> None:
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            self._enter_tensor(name, thing)
        elif isinstance(thing, nn.Module):
            self._enter_object(f"{name} ({type(thing).__name__})", thing, vars(thing))
        elif isinstance(thing, tuple):
            self._enter_all(name, enumerate(thing))
        elif type(thing) in _CONTAINERS:
            self._enter_container(name, thing)
        elif isinstance(thing, partial):
            self._enter_all(name, enumerate((thing.func, *thing.args, *thing.keywords.values())))
        elif isinstance(thing, MethodType):
            self._enter(name, thing.__self__)
            self._enter(name, thing.__func__)
        elif isinstance(thing, weakref.ref):
            self._enter(f"{name}()", thing())
        elif isinstance(thing, BuiltinMethodType):
            self._enter(name, thing.__self__)
        elif isinstance(thing, _lru_cache_wrapper):
            self._enter(name, thing.__wrapped__)
        elif isinstance(thing, staticmethod | classmethod | property):
            self._enter(name, thing.fget if isinstance(thing, property) else thing.__func__)
        elif isinstance(thing, FunctionType):
            self._enter_function(name, thing)
        elif isinstance(thing, type):
            self._enter_class(thing)
        elif (state := _state_of(thing)) is not None:
            self._hold(name, thing, *state, form="")
        elif isinstance(thing, SimpleNamespace | UserDict) or not is_of_library(type(thing)):
            self._enter_object(name, thing, _own(thing))

    def _enter_all(self, name: str, entries: Iterable[tuple[Any, Any]]) -> None:
        for key, value in entries:
            self._enter(f"{name}[{key!r}]" if isinstance(key, PLAIN) else f"{name}[…]", value)

    def _enter_object(self, name: str, thing: Any, own: Any) -> None:
        if isinstance(own, dict) and id(own) not in self._seen:
            self._seen[id(own)] = own
            for key, value in self._hold(name, own, lambda: own, partial(_put_dict, own)).items():
                if isinstance(thing, nn.Module) and key in ("_parameters", "_buffers", "_modules"):
                    self._seen[id(value)] = value
                    found = self._hold(name, value, partial(_itself, value), partial(_put_dict, value))
                    inner = name.rpartition(" (")[0]
                    for entry, held in found.items():
                        self._enter(f"{inner if isinstance(held, nn.Module) else name}.{entry}", held)
                else:
                    self._enter(f"{name}.{key}", value)
        slots = dict(_slots(type(thing))) if not isinstance(thing, nn.Module) else {}
        if slots:
            read = partial(_read_slots, thing, slots)
            for key, value in self._hold(name, thing, read, partial(_put_attributes, thing, read)).items():
                self._enter(f"{name}.{key}", value)
        self._enter(type(thing).__name__, type(thing))

    def _enter_container(self, name: str, thing: Any) -> None:
        if isinstance(thing, dict):
            self._hold(name, thing, lambda: thing, partial(_put_dict, thing), "[{!r}]")
        else:
            keyed = (lambda: {entry: entry for entry in thing}) if isinstance(thing, set) else None
            self._hold(name, thing, keyed or (lambda: dict(enumerate(thing))), partial(_refill, thing), "[{!r}]")
        if len(thing) <= _LONGEST:
            self._enter_all(name, list(thing.items() if isinstance(thing, dict) else enumerate(thing)))

    def _enter_function(self, name: str, function: FunctionType) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if cells:
            found = self._hold(name, function, partial(_read_cells, cells), partial(_put_cells, cells), ", {}")
            for key, value in found.items():
                self._enter(f"{name}, {key}", value)
        self._enter_all(name, enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())))
        if is_of_library(function):
            return
        self._enter(name, vars(function))
        names = frozenset(names_of(function.__code__))
        self._enter_space(function.__globals__, globals_of(function.__code__), names)

    def _enter_space(self, space: dict[str, Any], own: frozenset[str], names: frozenset[str]) -> None:
        """Look into what some names are in a module of the user's; `own` are those of the module itself."""
        read = partial(_read_names, space, own)
        for key, value in self._hold("", space, read, partial(_put_names, space, read), "{}").items():
            if not isinstance(value, ModuleType):
                self._enter(key, value)
            elif not is_library_module(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._enter_space(vars(value), names, names)

    def _enter_class(self, kind: type) -> None:
        if not is_of_library(kind):
            read = partial(_read_class, kind)
            self._hold(kind.__name__, kind, read, partial(_put_attributes, kind, read))
            for key, value in list(vars(kind).items()):
                self._enter(f"{kind.__name__}.{key}", value)
            for base in kind.__bases__:
                self._enter(base.__name__, base)

    def _enter_tensor(self, name: str, tensor: Tensor) -> None:
        """Note the numbers of a tensor of torch's own with memory of its own; weights are what training changes."""
        if isinstance(tensor, nn.Parameter):
            self._hold(name, tensor, lambda: {"requires_grad": tensor.requires_grad}, partial(_put_flag, tensor))
        if isinstance(tensor, nn.Parameter | DTensor) or type(tensor) is not Tensor or tensor.is_inference():
            return
        if tensor.is_meta or (tensor.layout is torch.strided and tensor.untyped_storage().size()):
            was = tensor.detach().clone() if self._numbers else tensor
            self._tensors.append((name, tensor, tensor._version, tensor.data, was))


def _has_changed(tensor: Tensor, version: int, was: Tensor) -> bool:
    """Whether a tensor has other numbers by now."""
    if tensor.is_meta:
        return tensor._version != version
    return (tensor._version != version or tensor.device.type == "cpu") and not _equal(tensor, was)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


def _is_same_dict(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if len(one) != len(other):
        return False
    if all(map(is_, one, other)) and all(map(is_, one.values(), other.values())):
        return True
    return all((a is b or a == b) and _is_same(one[a], other[b]) for a, b in zip(one, other, strict=True))


def _itself(thing: dict[Any, Any]) -> dict[Any, Any]:
    return thing


def _own(thing: Any) -> Any:
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None


def _slots(kind: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    for base in kind.__mro__:
        if "__slots__" in vars(base) and not is_of_library(base):
            yield from ((key, slot) for key, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))


def _read_slots(thing: Any, slots: Mapping[str, Any]) -> dict[str, Any]:
    return {key: slot.__get__(thing) for key, slot in slots.items() if hasattr(thing, key)}


def _read_class(kind: type) -> dict[str, Any]:
    """Return the attributes of a class that are no code."""
    code = (FunctionType, type, staticmethod, classmethod, property, MemberDescriptorType)
    return {k: v for k, v in vars(kind).items() if not isinstance(v, code) and not (k[:2] == "__" == k[-2:])}


def _read_names(space: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: space[name] for name in sorted(names) if name in space}


def _read_cells(cells: Mapping[str, CellType]) -> dict[str, Any]:
    return {key: cell.cell_contents for key, cell in cells.items() if cell != CellType()}


def _put_cells(cells: Mapping[str, CellType], before: Mapping[str, Any]) -> None:
    for key, value in before.items():
        cells[key].cell_contents = value


def _put_flag(weight: nn.Parameter, before: Mapping[str, bool]) -> None:
    weight.requires_grad_(before["requires_grad"])


def _put_dict(thing: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    thing.clear()
    thing.update(before)


def _put_names(space: dict[str, Any], read: Callable[[], dict[str, Any]], before: Mapping[str, Any]) -> None:
    for key in read().keys() - before.keys():
        del space[key]
    space.update(before)


def _put_attributes(thing: Any, read: Callable[[], dict[str, Any]], before: Mapping[str, Any]) -> None:
    now = read()
    for key in now.keys() - before.keys():
        delattr(thing, key)
    for key, value in before.items():
        if now.get(key, _GONE) is not value:
            setattr(thing, key, value)


def _refill(thing: Any, before: Mapping[Any, Any]) -> None:
    thing.clear()
    (thing.update if isinstance(thing, set) else thing.extend)(before.values())


_State = tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], None]]


def _state_of(thing: Any) -> _State | None:
    """Return what reads where a generator is, or what is in an array, in one entry, and what sets it."""
    if isinstance(thing, Random) and not isinstance(thing, SystemRandom):
        return _in_one(lambda: repr(thing.getstate()), thing.getstate(), thing.setstate)
    if isinstance(thing, np.random.RandomState):
        return _in_one(lambda: repr(thing.get_state()), thing.get_state(), thing.set_state)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return _in_one(lambda: repr(bits.state), bits.state, partial(setattr, bits, "state"))
    if isinstance(thing, torch.Generator):
        return _in_one(lambda: thing.get_state().numpy().tobytes().hex(), thing.get_state(), thing.set_state)
    if isinstance(thing, np.ndarray) and thing.dtype != object and thing.flags.writeable and thing.nbytes < _MOST_BYTES:
        return _in_one(lambda: bytes_of(thing).hex(), thing.copy(), partial(np.copyto, thing))
    return None


def _in_one(read: Callable[[], str], state: Any, put: Callable[[Any], Any]) -> _State:
    def put_back(before: dict[Any, Any]) -> None:
        put(state)

    return lambda: {"": read()}, put_back
