"""What an optimizer keeps beside its parameters' own state: it belongs to a group, or to the optimizer.

    engine.optimizer.0/groups/1/k#          of a group: what a step changes (schedule-free, Prodigy)
    engine.optimizer.0/attributes/count#    an attribute that is not what it was when the optimizer was made
    engine.optimizer.0/state#               state under keys that are no parameters
    engine.optimizer.0/shared#              which states of parameters are one tensor
    engine.optimizer.0.base/…               the same of an optimizer that it steps (Lookahead)

Settings that only a program changes, such as a learning rate, are the program's, and are not saved. torch's own
optimizers keep nothing of this kind, and are not looked at.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import MisfitError, UsageError

from ..blocks.plain_values import TEXT, NotPlainError, pack, quoted, unpack, unquoted

BESIDE = "engine.optimizer."
"""How the names of all this begin."""

_OF_ALL = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))]))) | {"_opt_called", "_step_count"}
"""Attributes that every optimizer has, or a scheduler gives it."""

_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial)
_OTHERS = (Optimizer, nn.Module, logging.Logger)
_DEEPEST, _OBJECTS = 24, 12
"""How deep values are looked through; objects of other classes that are in one another are looked at once."""

_GONE = object()

Names = Mapping[int, str]
"""Words for tensors that are known otherwise, by their ids."""

Named = Mapping[str, tuple[nn.Parameter, dict[str, Any]]]
"""By names of weights, what is stepped of them, and what is kept for it."""

Tensors = Mapping[str, Tensor]


class OwnState:
    """What one of a rank's optimizers keeps beside.

    Args:
        number: which of the optimizers it is, in the order in which they were built.
    """

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self.number, self.optimizer, self._kind = number, optimizer, type(optimizer).__name__
        self.is_foreign = not type(optimizer).__module__.startswith("torch.optim.")
        self._watched: list[_Watched] = []
        if self.is_foreign:
            handled: dict[int, None] = {}
            for path, one in _nested(optimizer):
                self._watched.append(_Watched(f"{BESIDE}{number}{path}/", one, not path, handled))

    def begin_step(self) -> None:
        """Take note of the groups as they are before a step."""
        for one in self._watched:
            one.begin_step()

    def end_step(self) -> None:
        """Find what of the groups the step has changed."""
        for one in self._watched:
            one.end_step()

    def pack(self, names: Names) -> dict[str, Tensor]:
        """Return it as tensors; raises `UsageError` for what no file of tensors can hold."""
        found: dict[str, Tensor] = {}
        try:
            for one in self._watched:
                found |= one.pack(names.get)
            if not found and len(self._watched) == 1 and self._watched[0].gives_more():
                raise NotPlainError("what its state_dict gives is neither in its state, its groups nor its attributes")
        except NotPlainError as error:
            raise UsageError(
                f"{self._kind} keeps what no checkpoint can hold: {error}; in its state, groups and attributes it may "
                "keep tensors, numbers, strings, and lists and dicts of these"
            ) from None
        return found

    def pack_shared(self, weights: Named) -> dict[str, Tensor]:
        """Return which states of several parameters are one tensor."""
        places: dict[int, list[list[str]]] = {}
        for name, (_, kept) in weights.items() if self.is_foreign else ():
            for key, value in kept.items():
                if isinstance(value, Tensor) and type(key) is str:
                    places.setdefault(id(value), []).append([name, key])
        shared = [found for found in places.values() if len(found) > 1]
        return pack(f"{BESIDE}{self.number}/shared", shared) if shared else {}

    def share(self, state: Tensors, weights: Named) -> None:
        """Let states of several parameters be one tensor again."""
        name = f"{BESIDE}{self.number}/shared"
        for places in unpack(name, state) if f"{name}{TEXT}" in state else ():
            here = [(weights[weight][1], key) for weight, key in places if weight in weights]
            for kept, key in here[1:]:
                kept[key] = here[0][0][key]

    def require_loadable(self, names: Collection[str]) -> None:
        """Raise `MisfitError` for names of what another optimizer has kept."""
        mine = f"{BESIDE}{self.number}"
        known = tuple(prefix for one in self._watched for prefix in one.prefixes)
        for name in names:
            if name.startswith((f"{mine}/", f"{mine}.")) and not name.startswith(known):
                raise MisfitError(f"the state is of another optimizer than {self._kind}, which has no {name!r}")

    def load(self, state: Tensors, device: torch.device, tensors: Tensors) -> None:
        """Take over what `pack` gave; `tensors` are those that go by words."""
        for one in self._watched:
            one.load(state, device, tensors)


def words_of(weights: Named) -> dict[str, Tensor]:
    """Return the tensors that go by words: parameters, and their states."""
    found: dict[str, Tensor] = {}
    for name, (parameter, kept) in weights.items():
        found[f"parameter {name}"] = parameter
        found |= {f"state {name} {key}": value for key, value in kept.items() if isinstance(value, Tensor)}
    return found


def _nested(optimizer: Optimizer, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Optimizer]]:
    """Yield an optimizer and those that it steps, by their places in it."""
    seen = set() if seen is None else seen
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    yield path, optimizer
    for name, value in _attributes(optimizer).items():
        items = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
        for number, item in items:
            if isinstance(item, Optimizer):
                yield from _nested(item, f"{path}.{name}{number}", seen)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    slots = (name for kind in type(optimizer).__mro__ for name in getattr(kind, "__slots__", ()))
    own = {name: getattr(optimizer, name) for name in slots if hasattr(optimizer, name)} | vars(optimizer)
    return {name: value for name, value in own.items() if name not in _OF_ALL and not isinstance(value, _CODE)}


class _Watched:
    """One optimizer, or one that it steps.

    Args:
        prefix: how names of what it keeps begin.
        is_outer: whether its parameters' states are saved with their weights.
        handled: the ids of groups and states that belong to the optimizers before it.
    """

    def __init__(self, prefix: str, optimizer: Optimizer, is_outer: bool, handled: dict[int, None]) -> None:
        self._prefix, self._optimizer, self._is_outer = prefix, optimizer, is_outer
        self.prefixes = tuple(f"{prefix}{kind}" for kind in ("groups/", "attributes/", "state#", "shared#"))
        self._groups = {n: group for n, group in enumerate(optimizer.param_groups) if id(group) not in handled}
        self._has_state = id(optimizer.state) not in handled
        handled.update(
            dict.fromkeys([id(optimizer.param_groups), id(optimizer.state), *map(id, self._groups.values())])
        )
        self._handled = handled
        self._moving: dict[int, set[str]] = {number: set() for number in self._groups}
        self._before: dict[int, dict[str, object]] = {}
        self._initial_settings = {number: _plain_of(settings_of(group)) for number, group in self._groups.items()}
        self._initial = self._tokens()
        self._initial_values = _plain_of(self._own_attributes())
        self._initial_more = self._more()

    def _own_attributes(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in _attributes(self._optimizer).items()
            if id(value) not in self._handled and not _holds_optimizers(value)
        }

    def _tokens(self) -> dict[str, object]:
        return {name: token_of(value) for name, value in self._own_attributes().items()}

    def _more(self) -> object:
        """Return what an own state_dict gives beside torch's, in tokens."""
        if type(self._optimizer).state_dict is Optimizer.state_dict:
            return None
        try:
            more = self._optimizer.state_dict()
        except Exception:
            return None
        return token_of({key: value for key, value in more.items() if key not in ("state", "param_groups")})

    def begin_step(self) -> None:
        """Take note of the groups."""
        for number, group in self._groups.items():
            self._before[number] = {key: token_of(value) for key, value in settings_of(group).items()}

    def end_step(self) -> None:
        """Find what has changed in them."""
        for number, group in self._groups.items():
            before, after = self._before[number], settings_of(group)
            self._moving[number].update(key for key in before if key not in after)
            self._moving[number].update(
                key for key, value in after.items() if key not in before or token_of(value) != before[key]
            )

    def pack(self, name_of: Callable[[int], str | None]) -> dict[str, Tensor]:
        """Return what it keeps as tensors."""

        def known(tensor: Tensor) -> str | None:
            return name_of(id(tensor))

        found: dict[str, Tensor] = {}
        for number, group in self._groups.items():
            for key in sorted(self._moving[number] & group.keys()) if group["params"] else ():
                found |= _packed(f"{self._prefix}groups/{number}/{quoted(key)}", key, group[key], known)
        changed = {
            name: value
            for name, value in self._own_attributes().items()
            if self._initial.get(name, _GONE) != token_of(value)
        }
        for name, value in changed.items():
            found |= _packed(f"{self._prefix}attributes/{quoted(name)}", name, value, known)
        found |= self._pack_state(known)
        return found

    def gives_more(self) -> bool:
        """Whether an own state_dict gives other things than at first."""
        return self._more() != self._initial_more

    def _pack_state(self, known: Callable[[Tensor], str | None]) -> dict[str, Tensor]:
        if not self._has_state:
            return {}
        stepped = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        state = self._optimizer.state
        pairs = [[key, _plain(kept)] for key, kept in state.items() if not (self._is_outer and id(key) in stepped)]
        if any(isinstance(key, Tensor) and known(key) is None for key, _ in pairs):
            raise NotPlainError("its state has a key that is a tensor, and no parameter that it was given")
        return _packed(f"{self._prefix}state", "state", pairs, known) if pairs else {}

    def load(self, state: Tensors, device: torch.device, tensors: Tensors) -> None:
        """Take over what it kept; what is not there becomes what it was when the optimizer was made."""

        def given(name: str) -> Any:
            return unpack(name, state, device, tensors.__getitem__)

        for number, group in self._groups.items():
            prefix = f"{self._prefix}groups/{number}/"
            found = {unquoted(key): given(f"{prefix}{key}") for key in _keys(state, prefix)}
            initial = self._initial_settings[number]
            _restore(group, found, {key: initial.get(key, _GONE) for key in self._moving[number]})
            self._moving[number].update(found)
        prefix = f"{self._prefix}attributes/"
        found = {unquoted(key): given(f"{prefix}{key}") for key in _keys(state, prefix)}
        now = self._own_attributes()
        changed = [name for name, value in now.items() if self._initial.get(name, _GONE) != token_of(value)]
        made = {**now}
        _restore(made, found, {name: self._before_steps(name) for name in changed})
        for name in now.keys() - made.keys():
            delattr(self._optimizer, name)
        for name, value in made.items():
            if now.get(name, _GONE) is not value:
                setattr(self._optimizer, name, value)
        self._load_state(state, given)

    def _before_steps(self, name: str) -> object:
        """Return an attribute as it was; nothing is known of tensors, which the state has to bring."""
        return self._initial_values.get(name, _GONE if name not in self._initial else _LOST)

    def _load_state(self, state: Tensors, given: Callable[[str], Any]) -> None:
        if not self._has_state:
            return
        kept = self._optimizer.state
        stepped = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        for key in [key for key in kept if not (self._is_outer and id(key) in stepped)]:
            del kept[key]
        name = f"{self._prefix}state"
        for key, value in given(name) if f"{name}{TEXT}" in state else ():
            kept[key] = value


_LOST = object()


def _restore(held: dict[str, Any], found: Mapping[str, Any], initial: Mapping[str, Any]) -> None:
    """Let values be as they are found, in place where that can be; others as they were at first."""
    for key, value in {**initial, **found}.items():
        if value is _LOST:
            raise MisfitError(
                f"the state was saved before the optimizer's {key!r} had changed, which it has here; load it into a "
                "fresh engine"
            )
        if value is _GONE:
            held.pop(key, None)
        elif not _filled(held.get(key), value):
            held[key] = value


def _filled(held: Any, value: Any) -> bool:
    """Put a value into what is held, which others may hold too; return whether that can be."""
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


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group holds beside its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _keys(state: Tensors, prefix: str) -> list[str]:
    return [
        name.removeprefix(prefix).removesuffix(TEXT)
        for name in state
        if name.startswith(prefix) and name.endswith(TEXT)
    ]


def _plain(kept: Any) -> Any:
    return dict(kept) if isinstance(kept, Mapping) else kept


def _packed(name: str, key: str, value: Any, known: Callable[[Tensor], str | None]) -> dict[str, Tensor]:
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


def _holds_optimizers(value: object) -> bool:
    return any(isinstance(item, Optimizer) for item in (value if isinstance(value, list | tuple) else [value]))


class _Identity:
    """Equal to that of the same object, while it lives."""

    def __init__(self, value: object) -> None:
        self._ref = ref(value) if type(value).__weakrefoffset__ else partial(_itself, value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Identity) and mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


def _itself(value: object) -> object:
    return value


def token_of(value: Any, depth: int = 0) -> object:
    """Return what tells whether a value has changed since: of tensors that they were written to, not their numbers.

    Of objects of other classes, what they hold themselves counts; modules and loggers are none of the optimizer's.
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
