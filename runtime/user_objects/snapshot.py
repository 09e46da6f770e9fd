"""Snapshots of host state that code can change: to name what has changed since, and to restore it.

    snapshot = Snapshot({"model": model})
    …                                       code runs as a trial, or must change nothing
    snapshot.changes()                      "model (Mixer).options['seen']", old value, new value
    snapshot.put_back()

    modules, plain objects   attributes, hooks, overridden forwards, however these are written        ┐
    dicts, lists, sets       entries; so of deques, and of objects in tuples                          │ of user code
    classes, functions       attributes of classes; closures, defaults, and globals that code names   │ all of it, of
    tensors, arrays          numbers, by the version counters of torch, restored in place             │ libraries'
    generators               their state                                                              ┘ modules alone

Iterators cannot be restored. Used by all trial runs beside training: splitting, shape tracing, examination of losses,
and the reads of blocks in `parallel.cut_proofs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from io import IOBase
from operator import is_
from queue import Queue, SimpleQueue
from threading import Event, Semaphore
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import CallableProxyType, ProxyType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quintsched.errors import MisfitError

from .host_value_equality import GONE, putter_of, state_of
from .host_value_equality import is_same as is_same
from .library_or_user import PLAIN_TYPES, globals_of, is_library_module, is_of_library, is_ours, names_of
from .object_contents import (
    CONTAINERS,
    HOOKS,
    LONGEST,
    REGISTRIES,
    ClosureCells,
    Entries,
    HolderPlaces,
    OfClass,
    Slots,
    Trained,
    Whole,
    defaults_of,
    own_attributes,
    parts_of,
    space_of,
)

_NO_ITERATORS: tuple[type, ...] = (IOBase, ProxyType, CallableProxyType)
"""Types with `__next__` that are no iterators here: files, and weak proxies, whose referents may lack it."""
_MOST, _MOST_NEAR, _MOST_BYTES = 100_000, 2000, 1 << 24
"""Limits: objects that are entered, the same where library objects are entered too, and bytes of an array."""


class ChangedPlace(NamedTuple):
    """Place whose value differs from the snapshot.

    Attributes:
        name: of the place, in words.
        owner: the name of its holder.
        place: the id of its holder, and its key there.
        was, now: old and new value; a tensor written in place is given with a copy of its old numbers.
    """

    name: str
    owner: str
    place: tuple[int, Any]
    was: Any
    now: Any


class UntriedError(MisfitError):
    """Code depends on an object that no trial run can restore, see `require_undone`."""


def require_undone(held: Snapshot, what: str) -> None:
    """Raise `UntriedError` where a snapshot holds an object that a trial run cannot restore, or no step handles.

    These are leaf tensors with requires_grad that are no parameters (their gradients would not be accumulated, reduced
    over ranks or scaled as the loss is), and iterators (consumed items are gone).
    """
    for name, tensor in held.tensors():
        if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
            raise UntriedError(
                f"{what} goes by {name.lstrip('. ')}, a tensor with requires_grad that is no parameter, so that nobody "
                "adds its gradient up over microbatches and ranks: register it as nn.Parameter(tensor) of a module, "
                "which the optimizer is given, or let it have no gradient"
            )
    for name, thing in held.iterators:
        require_no_iterator(what, name, thing)


def require_no_iterator(what: str, name: str, thing: Any) -> None:
    """Raise `UntriedError` if the object of this name is a library iterator or a queue."""
    takes = isinstance(thing, Iterator) and is_of_library(type(thing)) and not issubclass(type(thing), _NO_ITERATORS)
    if (takes or isinstance(thing, SimpleQueue)) and not is_ours(type(thing)):
        raise UntriedError(
            f"{what} goes by {name.lstrip('. ')}, a {type(thing).__name__}: what is taken from an iterator cannot be "
            "put back behind a trial, nor saved in a checkpoint; keep the items in a list, and count in a buffer which "
            "is next"
        )


def label_in(root: nn.Module, path: str) -> str:
    """Return the name of a submodule in a snapshot of a root without a name."""
    return f"{path and f'.{path}'} ({type(root.get_submodule(path)).__name__})"


class _Held(NamedTuple):
    """Holder in a snapshot: its name, its places, and their values at the time."""

    name: str
    space: HolderPlaces
    before: Mapping[Any, Any]


class Snapshot:
    """Host state reachable from roots, and from the names in their code, recorded at construction.

    Args:
        roots: modules, functions and other objects, by their names in messages.
        numbers: whether tensors are copied; if not, the snapshot only shows which object holds which.
        of_libraries: whether library objects other than modules are entered too, up to a smaller limit.

    Attributes:
        plain: numbers, strings and flags found, in breadth-first order.
        iterators: library iterators (files included) and queues, by name.
    """

    def __init__(self, roots: Mapping[str, Any], *, numbers: bool = True, of_libraries: bool = False) -> None:
        self._numbers = numbers
        self._looked_into: Any = (
            object if of_libraries else SimpleNamespace | MutableMapping | Queue | Event | Semaphore
        )
        self._most = _MOST_NEAR if of_libraries else _MOST
        self.plain: list[Any] = []
        self.iterators: list[tuple[str, Any]] = []
        self._seen: dict[int, Any] = {}
        self._held: list[_Held] = []
        self._tensors: list[tuple[str, Tensor, int, Tensor, Tensor]] = []
        self._free = set[int]()  # ids of those without a graph
        self._waiting = deque(roots.items())
        modules = (root for root in roots.values() if isinstance(root, nn.Module))
        self._weights = {id(weight) for root in modules for weight in root.parameters()}
        while self._waiting:
            self._look_into(*self._waiting.popleft())

    def changes(self) -> Iterator[ChangedPlace]:
        """Yield places whose values have changed, and tensors that were written to."""
        for name, space, before in self._held:
            now = space.read_values()
            if not _is_same_dict(before, now):
                for key in [*before, *(key for key in now if key not in before)]:
                    was, found = before.get(key, GONE), now.get(key, GONE)
                    if not is_same(was, found):
                        was, found = (None if value is GONE else value for value in (was, found))
                        yield ChangedPlace(space.label(name, key), name, (id(space.holder), key), was, found)
        for name, tensor, version, _, was in self._tensors:
            if tensor._version != version or _has_changed(tensor, version, was):
                yield ChangedPlace(name, name, (id(tensor), None), was, tensor)

    def holders(self) -> Iterator[tuple[str, int]]:
        """Yield the names and ids of all mutable objects found."""
        yield from [(held.name, id(held.space.holder)) for held in self._held]
        yield from [(name, id(tensor)) for name, tensor, *_ in self._tensors]

    def cells(self) -> Iterator[tuple[str, int]]:
        """Yield the names and ids of closure cells, which several functions may share."""
        for held in self._held:
            if isinstance(held.space, ClosureCells):
                for key, cell in held.space.cells.items():
                    yield held.space.label(held.name, key), id(cell)

    def spaces(self) -> Iterator[tuple[str, HolderPlaces]]:
        """Yield the names and places of all holders."""
        return iter([(held.name, held.space) for held in self._held])

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors by name, parameters first, then in breadth-first order."""
        weights = [(held.name, held.space.holder) for held in self._held if isinstance(held.space, Trained)]
        return weights + [(name, tensor) for name, tensor, *_ in self._tensors]

    def values(self) -> Iterator[Any]:
        """Yield all objects that were entered."""
        return iter(self._seen.values())

    def functions(self) -> list[FunctionType]:
        """Return the user functions that were entered."""
        return [thing for thing in self._seen.values() if isinstance(thing, FunctionType) and not is_of_library(thing)]

    def put(self, owner: str, key: Any, value: Any) -> None:
        """Set the value under a key of the holder of this name, until `put_back`."""
        found = [held for held in self._held if held.name == owner]
        for held in sorted(found, key=lambda held: key not in held.before)[:1]:
            held.space.put_back({**held.before, key: value})

    def put_back(self) -> None:
        """Restore all places and tensors."""
        for _, tensor, version, memory, was in self._tensors:
            if _has_changed(tensor, version, was) and not tensor.is_meta:
                memory.copy_(was)
                if tensor.data_ptr() != memory.data_ptr():
                    tensor.data = memory
                if tensor.grad_fn is not None and id(tensor) in self._free and not tensor._is_view():
                    tensor.detach_()  # changed in place by what requires a gradient in a trial
        for _, space, before in self._held:
            if not _is_same_dict(before, space.read_values()):
                space.put_back(before)

    def _hold(self, name: str, space: HolderPlaces) -> Mapping[Any, Any]:
        self._held.append(_Held(name, space, dict(space.read_values())))
        return self._held[-1].before

    def _enter(self, name: str, thing: Any) -> None:
        """Enter an object, once."""
        if isinstance(thing, PLAIN_TYPES):
            self.plain.append(thing)
        elif id(thing) not in self._seen and len(self._seen) < self._most:
            self._seen[id(thing)] = thing
            self._waiting.append((name, thing))

    def _enter_all(self, name: str, space: HolderPlaces, entries: Iterable[tuple[Any, Any]]) -> None:
        for key, value in entries:
            self._enter("" if isinstance(value, PLAIN_TYPES) else space.label(name, key), value)

    def _look_into(self, name: str, thing: Any) -> None:
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            self._enter_tensor(name, thing)
        elif isinstance(thing, nn.Module):
            self._enter_object(f"{name} ({type(thing).__name__})", thing)
        elif type(thing) in CONTAINERS:
            space = space_of(thing)
            before = self._hold(name, space)
            if len(before) <= LONGEST:
                of_users = not name.endswith(HOOKS)  # this package's hooks lead to all of the engine
                self._enter_all(name, space, [one for one in before.items() if of_users or not is_ours(one[1])])
        elif (parts := parts_of(thing)) is not None:
            for place, part in parts:
                self._enter(f"{name}{place}", part)
        elif isinstance(thing, FunctionType):
            self._enter_function(name, thing)
        elif isinstance(thing, type):
            self._enter_class(thing)
        elif isinstance(thing, ModuleType):  # entered by `_enter_globals`, for the names in code
            return
        elif (read := state_of(thing, _MOST_BYTES)) is not None and (put := putter_of(thing)) is not None:
            self._hold(name, Whole(thing, read, put))
        elif isinstance(thing, Iterator | SimpleQueue) and is_of_library(type(thing)):
            self.iterators.append((name, thing))
        elif isinstance(thing, self._looked_into) or not is_of_library(type(thing)):
            self._enter_object(name, thing)

    def _enter_object(self, name: str, thing: Any) -> None:
        own = own_attributes(thing)
        if isinstance(own, dict) and id(own) not in self._seen:
            self._seen[id(own)] = own
            attributes = Entries(own, ".{}")
            held = self._hold(name, attributes)
            registries = {key: held[key] for key in REGISTRIES if key in held} if isinstance(thing, nn.Module) else {}
            for registered in registries.values():
                self._enter_registered(name, registered)
            self._enter_all(name, attributes, [(key, held[key]) for key in held if key not in registries])
        if not isinstance(thing, nn.Module) and (slots := Slots(thing)).keys():
            self._enter_all(name, slots, self._hold(name, slots).items())
        self._enter(type(thing).__name__, type(thing))

    def _enter_registered(self, name: str, registered: dict[str, Any]) -> None:
        """Enter the parameters, buffers or submodules of a module."""
        self._seen[id(registered)] = registered
        for key, held in self._hold(name, Entries(registered, ".{}")).items():
            self._enter(f"{name.rpartition(' (')[0] if isinstance(held, nn.Module) else name}.{key}", held)

    def _enter_function(self, name: str, function: FunctionType) -> None:
        if function.__closure__:
            cells = ClosureCells(function)
            self._enter_all(name, cells, self._hold(name, cells).items())
        for place, value in enumerate(defaults_of(function)):
            self._enter(f"{name}[{place}]", value)
        if not is_of_library(function):
            self._enter(name, vars(function))
            names = frozenset(names_of(function.__code__))
            self._enter_globals(function.__globals__, globals_of(function.__code__), names)

    def _enter_globals(self, space: dict[str, Any], own: frozenset[str], names: frozenset[str]) -> None:
        """Enter the values of some names in a user module; `own`: the names of the module itself."""
        for key, value in self._hold("", Entries(space, "{}", own)).items():
            if not isinstance(value, ModuleType):
                self._enter(key, value)
            elif not is_library_module(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._enter_globals(vars(value), names, names)

    def _enter_class(self, kind: type) -> None:
        if not is_of_library(kind):
            self._hold(kind.__name__, OfClass(kind))
            for key, value in list(vars(kind).items()):
                self._enter(f"{kind.__name__}.{key}", value)
            for base in kind.__bases__:
                self._enter(base.__name__, base)

    def _enter_tensor(self, name: str, tensor: Tensor) -> None:
        """Copy the numbers of a tensor with memory of its own; of parameters, only frozen ones of modules outside the
        roots: others are changed by training.
        """
        is_weight = isinstance(tensor, nn.Parameter)
        if is_weight:
            self._hold(name, Trained(tensor))
        is_of_root = is_weight and (tensor.requires_grad or id(tensor) in self._weights)
        wraps = is_traceable_wrapper_subclass(tensor)
        if is_of_root or wraps or tensor.is_inference():
            return
        if not is_weight and type(tensor) is not Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                tensor = tensor.as_subclass(Tensor)
        if tensor.is_meta or (tensor.layout is torch.strided and tensor.untyped_storage().size()):
            was = tensor.detach().clone() if self._numbers else tensor
            self._tensors.append((name, tensor, tensor._version, tensor.data, was))
            if tensor.grad_fn is None:
                self._free.add(id(tensor))


def _has_changed(tensor: Tensor, version: int, was: Tensor) -> bool:
    """Return whether the numbers of a tensor have changed."""
    if tensor.is_meta:
        return tensor._version != version
    return (tensor._version != version or tensor.device.type == "cpu") and not _equal(tensor, was)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _is_same_dict(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    if len(one) != len(other):
        return False
    if all(map(is_, one, other)) and all(map(is_, one.values(), other.values())):
        return True
    return all((a is b or a == b) and is_same(one[a], other[b]) for a, b in zip(one, other, strict=True))
