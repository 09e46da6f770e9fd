"""Optimizer state that belongs to no parameter: entries of groups, attributes of the optimizer, and other keys.

    engine.optimizer.0/groups/1/k#          an entry of a group that a step changes (schedule-free, Prodigy)
    engine.optimizer.0/attributes/count#    an attribute that has changed since the optimizer was built
    engine.optimizer.0/state#               state under keys that are no parameters
    engine.optimizer.0/shared#              states of several parameters that are one tensor
    engine.optimizer.0.base/…               the same for an optimizer that it wraps (Lookahead)

Settings that only the training program changes, such as a learning rate, are not saved. torch's own optimizers have
no such state, and are not inspected.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import MisfitError, UsageError

from ..blocks.plain_values_as_tensors import TEXT, NotPlainError, pack, quoted, unpack, unquoted
from .accepted_optimizer_forms import parameters_of

OPTIMIZER_KEYS = "engine.optimizer."
"""Prefix of all these names."""

_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial)
_OTHERS = (Optimizer, nn.Module, logging.Logger)
_DEEPEST, _OBJECTS = 24, 12
"""Maximum depth of inspection; and that of other classes' objects within one another."""

_GONE, _LOST = object(), object()
"""Placeholders for a value: absent, and unknown though it was there."""

StateNames = Mapping[int, str]
"""Words for tensors that are saved elsewhere, by their ids."""

StateByName = Mapping[str, tuple[nn.Parameter, dict[str, Any]]]
"""Stepped parameters and their state, by the names of weights."""

TensorsByName = Mapping[str, Tensor]
Known = Callable[[Tensor], str | None]


class OwnState:
    """State of one of a rank's optimizers beside the per-parameter state.

    Args:
        number: index of the optimizer, in the order in which they were built.
    """

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self.optimizer, self._kind, self._mine = optimizer, type(optimizer).__name__, f"{OPTIMIZER_KEYS}{number}"
        self.is_foreign = not type(optimizer).__module__.startswith("torch.optim.")
        self._nested = [*_nested(optimizer)] if self.is_foreign else []
        self._groups, self._attributes = list[_Entries](), list[_Entries]()
        self._states: list[tuple[str, Optimizer]] = []
        seen: dict[int, None] = {}
        for path, one in self._nested:
            self._look_into(f"{self._mine}{path}/", one, seen)
        self._initial_more = self._more()

    def _look_into(self, prefix: str, one: Optimizer, seen: dict[int, None]) -> None:
        """Register the groups, state and attributes of an optimizer, except those in `seen`, by id."""
        for number, group in enumerate(one.param_groups):
            if id(group) not in seen and group["params"]:
                read = partial(settings_of, group)
                self._groups.append(_Entries(f"{prefix}groups/{number}/", read, group.__setitem__, group.pop))
        if id(one.state) not in seen:
            self._states.append((f"{prefix}state", one))
        seen.update(dict.fromkeys(map(id, (one.param_groups, one.state, *one.param_groups))))
        read = partial(_own_attributes, one, seen)
        self._attributes.append(_Entries(f"{prefix}attributes/", read, partial(setattr, one), partial(delattr, one)))

    def _more(self) -> object:
        """Return a token of an overridden state_dict's additional entries."""
        if len(self._nested) != 1 or type(self.optimizer).state_dict is Optimizer.state_dict:
            return None
        try:
            more = self.optimizer.state_dict()
        except Exception:
            return None
        return token_of({key: value for key, value in more.items() if key not in ("state", "param_groups")})

    def begin_step(self) -> None:
        """Record the groups before a step."""
        for group in self._groups:
            group.record_entries()

    def end_step(self) -> None:
        """Find the group entries that the step has changed."""
        for group in self._groups:
            group.find_changes()

    def pack(self, names: StateNames) -> dict[str, Tensor]:
        """Return it as tensors; raises `UsageError` for values that no file of tensors can hold."""

        def known(tensor: Tensor) -> str | None:
            return names.get(id(tensor))

        found: dict[str, Tensor] = {}
        try:
            for entries in self._attributes:
                entries.find_changes()
            for entries in (*self._groups, *self._attributes):
                found |= entries.pack(known)
            for name, one in self._states:
                found |= _packed(name, "state", pairs, known) if (pairs := self._state_of_none(one, known)) else {}
            if not found and self._more() != self._initial_more:
                raise NotPlainError("what its state_dict gives is neither in its state, its groups nor its attributes")
        except NotPlainError as error:
            raise UsageError(
                f"{self._kind} keeps what no checkpoint can hold: {error}; in its state, groups and attributes it may "
                "keep tensors, numbers, strings, and lists and dicts of these"
            ) from None
        return found

    def _state_of_none(self, one: Optimizer, known: Known) -> list[list[Any]]:
        """Return [key, value] pairs of a state that are saved with no weight."""
        pairs = [[key, dict(kept) if isinstance(kept, Mapping) else kept] for key, kept in self._unsaved(one)]
        if any(isinstance(key, Tensor) and known(key) is None for key, _ in pairs):
            raise NotPlainError("its state has a key that is a tensor, and no parameter that it was given")
        return pairs

    def _unsaved(self, one: Optimizer) -> list[tuple[Any, Any]]:
        stepped = {id(p) for p in parameters_of(one)} if one is self.optimizer else set[int]()
        return [(key, kept) for key, kept in one.state.items() if id(key) not in stepped]

    def pack_shared(self, weights: StateByName) -> dict[str, Tensor]:
        """Return the places of parameter states that are one tensor, as tensors."""
        places: dict[int, list[list[str]]] = {}
        for name, (_, kept) in weights.items() if self.is_foreign else ():
            for key, value in kept.items():
                if isinstance(value, Tensor) and type(key) is str:
                    places.setdefault(id(value), []).append([name, key])
        shared = [found for found in places.values() if len(found) > 1]
        return pack(f"{self._mine}/shared", shared) if shared else {}

    def share(self, state: TensorsByName, weights: StateByName) -> None:
        """Restore one shared tensor for states of several parameters."""
        name = f"{self._mine}/shared"
        for places in unpack(name, state) if f"{name}{TEXT}" in state else ():
            here = [(weights[weight][1], key) for weight, key in places if weight in weights]
            for kept, key in here[1:]:
                kept[key] = here[0][0][key]

    def require_loadable(self, names: Collection[str]) -> None:
        """Raise `MisfitError` for names that another optimizer has saved."""
        kinds = ("groups/", "attributes/", "state#", "shared#")
        known = tuple(f"{self._mine}{path}/{kind}" for path, _ in self._nested for kind in kinds)
        for name in names:
            if name.startswith((f"{self._mine}/", f"{self._mine}.")) and not name.startswith(known):
                raise MisfitError(f"the state is of another optimizer than {self._kind}, which has no {name!r}")

    def load_packed(self, state: TensorsByName, device: torch.device, tensors: TensorsByName) -> None:
        """Load a result of `pack`; `tensors` are those that are saved by words.

        Missing entries are reset to their values when the optimizer was built.
        """

        def given(name: str) -> Any:
            return unpack(name, state, device, tensors.__getitem__)

        for entries in self._attributes:
            entries.find_changes()
        for entries in (*self._groups, *self._attributes):
            entries.set_entries(state, given)
        for name, one in self._states:
            for key, _ in self._unsaved(one):
                del one.state[key]
            for key, value in given(name) if f"{name}{TEXT}" in state else ():
                one.state[key] = value


def words_of(weights: StateByName) -> dict[str, Tensor]:
    """Return the tensors that are saved by words: parameters, and their states."""
    found: dict[str, Tensor] = {}
    for name, (parameter, kept) in weights.items():
        found[f"parameter {name}"] = parameter
        found |= {f"state {name} {key}": value for key, value in kept.items() if isinstance(value, Tensor)}
    return found


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's entries other than its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _nested(optimizer: Optimizer, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Optimizer]]:
    """Yield an optimizer and those that it wraps, with their paths in it."""
    seen = set() if seen is None else seen
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    yield path, optimizer
    for name, value in _attributes(optimizer).items():
        for number, item in enumerate(value) if isinstance(value, list | tuple) else [("", value)]:
            if isinstance(item, Optimizer):
                yield from _nested(item, f"{path}.{name}{number}", seen)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    slots = (name for kind in type(optimizer).__mro__ for name in getattr(kind, "__slots__", ()))
    own = {name: getattr(optimizer, name) for name in slots if hasattr(optimizer, name)} | vars(optimizer)
    return {name: value for name, value in own.items() if name not in _of_all() and not isinstance(value, _CODE)}


@cache
def _of_all() -> frozenset[str]:
    """Return the attributes that every optimizer has, or that a scheduler sets."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))]))) | {"_opt_called", "_step_count"}


def _own_attributes(optimizer: Optimizer, seen: Collection[int]) -> dict[str, Any]:
    """Return attributes that are neither optimizers, nor shared by optimizers."""
    return {
        name: value
        for name, value in _attributes(optimizer).items()
        if id(value) not in seen
        and not any(isinstance(item, Optimizer) for item in (value if isinstance(value, list | tuple) else [value]))
    }


class _Entries:
    """Entries of a group, or attributes, of which those are saved that have changed since `record_entries`.

    Args:
        prefix: prefix of their names in a state.
        read, put, drop: return all entries, set one, delete one.
    """

    def __init__(
        self,
        prefix: str,
        read: Callable[[], dict[str, Any]],
        put: Callable[[str, Any], object],
        drop: Callable[[str], object],
    ) -> None:
        self._prefix, self._read, self._put, self._drop = prefix, read, put, drop
        self._moved: set[str] = set()
        values = read()
        self._initial = dict.fromkeys(values, _LOST) | _plain_of(values)
        self.record_entries()

    def record_entries(self) -> None:
        """Record all entries."""
        self._before = {key: token_of(value) for key, value in self._read().items()}

    def find_changes(self) -> None:
        """Find the entries that have changed."""
        now = {key: token_of(value) for key, value in self._read().items()}
        self._moved |= {key for key in {**now, **self._before} if now.get(key, _GONE) != self._before.get(key, _GONE)}

    def pack(self, known: Known) -> dict[str, Tensor]:
        """Return the changed entries, as tensors."""
        found: dict[str, Tensor] = {}
        for key, value in self._read().items():
            if key in self._moved:
                found |= _packed(f"{self._prefix}{quoted(key)}", key, value, known)
        return found

    def set_entries(self, state: TensorsByName, given: Callable[[str], Any]) -> None:
        """Set entries from a state, in place where possible; reset the other changed ones to their first values."""
        names = [name for name in state if name.startswith(self._prefix) and name.endswith(TEXT)]
        keys = [name.removeprefix(self._prefix).removesuffix(TEXT) for name in names]
        found = {key: self._initial.get(key, _GONE) for key in self._moved}
        found |= {unquoted(key): given(f"{self._prefix}{key}") for key in keys}
        now = self._read()
        for key, value in found.items():
            if value is _LOST:
                raise MisfitError(
                    f"the state was saved before the optimizer's {key!r} had changed, which it has here; load it into "
                    "a fresh engine"
                )
            if value is not _GONE and not _filled(now.get(key), value):
                self._put(key, value)
            elif value is _GONE and key in now:
                self._drop(key)
        self._moved.update(found)


def _filled(held: Any, value: Any) -> bool:
    """Write a value into a held object in place, as others may hold it too; return whether that is possible."""
    if type(held) is not type(value):
        return False
    if isinstance(held, Tensor) and held.shape == value.shape and held.dtype == value.dtype:
        held.detach().copy_(value)
    elif type(held) is list:
        held[:] = value
    elif isinstance(held, dict | set):
        held.clear()
        held.update(value)
    else:
        return False
    return True


def _packed(name: str, key: str, value: Any, known: Known) -> dict[str, Tensor]:
    try:
        return pack(name, value, known)
    except NotPlainError as error:
        raise NotPlainError(f"of its {key!r}, {error}") from None


def _plain_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of those values that hold no tensors."""
    found = {}
    for key, value in values.items():
        try:
            packed = pack("", value)
        except NotPlainError:
            continue
        if len(packed) == 1:
            found[key] = unpack("", packed)
    return found


class _Identity:
    """Compares equal for the same object, while it is alive."""

    def __init__(self, value: object) -> None:
        self._ref: Callable[[], object] = ref(value) if type(value).__weakrefoffset__ else lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Identity) and mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


def token_of(value: Any, depth: int = 0) -> object:
    """Return a token that changes with a value: for tensors by version counter, not numbers.

    For objects of other classes, their own attributes count; modules and loggers compare by identity.
    """
    if isinstance(value, Tensor):
        return _Identity(value), 0 if value.is_inference() else value._version
    if isinstance(value, float):
        return type(value), value.hex()
    if value is None or isinstance(value, int | str | bytes | complex):
        return type(value), value
    if isinstance(value, _CODE) or depth > _DEEPEST:
        return id(value)
    if isinstance(value, Mapping):
        return type(value), tuple((token_of(key, depth + 1), token_of(value[key], depth + 1)) for key in value)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return type(value), tuple(token_of(item, depth + 1) for item in value)
    if isinstance(value, _OTHERS) or depth >= _OBJECTS:
        return _Identity(value)
    inner = getattr(value, "__dict__", {})
    return _Identity(value), tuple((key, token_of(item, _OBJECTS + depth + 1)) for key, item in inner.items())
