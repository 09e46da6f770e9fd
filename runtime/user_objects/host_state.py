"""Host state (Python objects and values) that blocks and functions read, compared from step to step.

    state = HostState({"block 2": block}, {"the loss function": loss_fn})
    state.changed()        "block 2 (Mixer).rate": its value has changed; None: nothing has
    state.tensors()        tensors among the host state, which code may change in place

    code        forward, the functions, and all code that these refer to
    values      attributes, closure variables and globals with names that the code uses, also as strings: numbers,
                strings, flags, and tuples of these by value; other objects by identity
    containers  found on the way: their length, and their entries, if these are few
    generators  their state; arrays: their bytes, if these are few
    modules     hooks, submodules, data_ptr of parameters that are not trained here; of library modules: attributes

Other library objects are not inspected; no user code is called.
"""

from __future__ import annotations

import functools
import gc
from _thread import LockType, RLock
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from logging import Logger
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from .find_impure_code import has_known_content
from .host_value_equality import OPERATORS, is_same, state_of
from .library_or_user import PLAIN_TYPES, globals_of, is_library_module, is_of_library, names_of, texts
from .object_contents import (
    CONTAINERS,
    HOOKS,
    LONGEST,
    OF_TORCH,
    ClosureCells,
    Entries,
    HolderPlaces,
    OfClass,
    Slots,
    defaults_of,
    own_attributes,
    parts_of,
    space_of,
)

_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, WeakKeyDictionary, WeakValueDictionary)
_STILL = (*PLAIN_TYPES, LockType, RLock, torch.jit.ScriptFunction)
_PASSED_ON = (tuple, MethodType, staticmethod, classmethod, property, functools.cached_property)
_HOOKS = ", its hooks"
_ENUMERATING = {"vars", "dir", "__dict__"}
"""Names in code that enumerate the attributes of an object."""
OF_FUNCTIONS = ("backward", "setup_context", "vjp", "jvp")
"""Methods of an autograd Function that torch calls, besides its forward."""


class WatchedPlace(NamedTuple):
    """Watched place: name, function that reads it, first value; its holder and key (None: the value is computed)."""

    name: str
    read: Callable[[], Any]
    seen: Any
    space: HolderPlaces | None = None
    key: Any = None

    @property
    def counts_entries(self) -> bool:
        """Return whether it is the length of a container."""
        return getattr(getattr(self.read, "func", None), "__name__", "") == "__len__"

    def write(self, value: Any) -> bool:
        """Write a value to the place; return whether that is possible."""
        if self.space is None or isinstance(self.space, OfClass):
            return False
        self.space.write(self.key, value)
        return True


class HostState:
    """Host state that modules and functions read, recorded at construction.

    Args:
        modules: root modules by name.
        functions: other callables by name.
        inner: whether submodules of the roots are watched as well.
        beside: modules by name; of these, only attributes are watched whose names the code of the others uses.

    Attributes:
        places: the watched places.
        unseen: name and class of the first object found whose content cannot be compared; None: there is none.
        names: the names that the code uses; enumerates: whether code enumerates the attributes of objects.
    """

    _most = 20_000
    """Values that are watched at most."""

    _is_of_library = False
    """Whether the object being entered belongs to a library function."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        functions: Mapping[str, Any],
        *,
        inner: bool = True,
        beside: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self.places: list[WatchedPlace] = []
        self.unseen: str | None = None
        methods = map("__{}__".format, (*OPERATORS, "get", "getattribute", "eq", "hash"))
        self.names = {"forward", *OF_FUNCTIONS, *methods}
        self._inner = inner
        self._known: dict[int, Any] = {}
        self._holders: list[tuple[str, Any, list[HolderPlaces]]] = []
        self._looked_up: set[tuple[int, str]] = set()
        self._tensors: dict[int, Tensor] = {}
        for name, root in modules.items():
            self._enter_module(name, root, is_trained=True)
        for name, function in functions.items():
            self._enter(name, function)
        self._look_up_all()
        for name, module in beside.items():
            own = Entries(vars(module), ".{}")
            for key in self.names & (own.holder.keys() - OF_TORCH):
                self._found(f"{name} ({type(module).__name__})", own, key)
        self._look_up_all()
        self.enumerates = not self.names.isdisjoint(_ENUMERATING)
        for name, holder, _ in self._holders if self.enumerates else ():
            if isinstance(own := own_attributes(holder), dict):
                self._watch(f"{name}, its attributes", functools.partial(tuple, own))

    @property
    def is_whole(self) -> bool:
        """Return whether every place found is watched: the limit was not reached."""
        return len(self.places) < self._most

    def changed(self) -> str | None:
        """Return the name of the first place whose value has changed; None where none has."""
        return next((place.name for place in self.moved()), None)

    def moved(self, places: Sequence[WatchedPlace] | None = None, *, hooks: bool = True) -> Iterator[WatchedPlace]:
        """Yield the places, of all or of the given ones, whose values have changed; `hooks=False` leaves hooks out."""
        for place in self.places if places is None else places:
            seen, now = place.seen, place.read()
            if now is not seen and not is_same(now, seen):
                now = self._seen(now)
                if now is not seen and not is_same(now, seen) and (hooks or _HOOKS not in place.name):
                    yield place

    def let_go(self) -> None:
        """Drop the references to visited objects; the watched places stay, and no new ones are found from now on."""
        self._known.clear()
        self._holders.clear()

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the host state, buffers included, parameters of modules not."""
        return list(self._tensors.values())

    def modules(self) -> list[nn.Module]:
        """Return the modules among the host state; none after `let_go`."""
        return [thing for thing in self._known.values() if isinstance(thing, nn.Module)]

    def _watch(self, name: str, read: Callable[[], Any], space: HolderPlaces | None = None, key: Any = None) -> Any:
        """Watch a place, and return its value."""
        found = read()
        if len(self.places) < self._most:
            self.places.append(WatchedPlace(name, read, self._seen(found), space, key))
        return found

    def _seen(self, value: Any) -> Any:
        """Return the form of a value that is stored and compared."""
        return value

    def _enter(self, name: str, thing: Any) -> None:
        """Enter an object that code refers to, once: watch its value or content."""
        is_still = type(thing) in PLAIN_TYPES or (isinstance(thing, _STILL) and own_attributes(thing) is None)
        if is_still or id(thing) in self._known or len(self._known) > self._most:
            return
        self._known[id(thing)] = thing
        enter = next((enter for kinds, enter in _ENTERED if isinstance(thing, kinds)), None)
        if enter is not None:
            enter(self, name, thing)
        elif (state := state_of(thing)) is not None:
            self._watch(name, state)
        elif isinstance(thing, functools._lru_cache_wrapper):
            self._watch(name, lambda: thing.cache_info()[1::2])
            self._enter(name, thing.__wrapped__)
        elif isinstance(thing, np.ndarray) or not has_known_content(thing):
            self._close(f"{name} ({type(thing).__module__}.{type(thing).__qualname__})")
        elif not is_of_library(thing if isinstance(thing, type) else type(thing)):
            self._look_up(*self._hold(name, thing))
            self._watch_attributes(name, thing)
            self._watch(f"{name}, its class", lambda: type(thing))
        else:
            self._enter_foreign(name, thing)

    def _enter_tensor(self, name: str, tensor: Tensor) -> None:
        self._watch(name, tensor.data_ptr)
        self._tensors[id(tensor)] = tensor

    def _enter_partial(self, name: str, thing: functools.partial[Any]) -> None:
        self._enter_all(name, self._watch(name, lambda: (thing.func, *thing.args)))
        self._enter_container(name, thing.keywords)

    def _enter_all(self, name: str, things: Iterable[Any]) -> None:
        for thing in things:
            self._enter(name, thing)

    def _enter_space(self, name: str, space: HolderPlaces, keys: Iterable[Any]) -> None:
        """Watch places of a holder, and enter their values."""
        for key in keys:
            label = space.label(name, key)
            self._enter(label, self._watch(label, space.reader(key), space, key))

    def _enter_foreign(self, name: str, thing: Any) -> None:
        """Enter a library object: watch its attributes that code names."""
        if not isinstance(thing, type):
            self._look_up(*self._hold(name, thing))

    def _close(self, name: str) -> None:
        """Record an object whose content cannot be compared, unless only library code uses it."""
        if not self._is_of_library:
            self.unseen = self.unseen or name

    def _watch_attributes(self, name: str, holder: Any) -> None:
        """Watch the number of attributes of a holder (in subclasses)."""

    def _enter_module(self, name: str, root: nn.Module, *, is_trained: bool = False) -> None:
        for inner, module in root.named_modules() if self._inner else [("", root)]:
            kind = type(module)
            label = f"{name}{inner and '.'}{inner} ({kind.__name__})"
            self._known[id(module)] = module
            self._watch_outline(label, module, root)
            for key in HOOKS:
                hooks = vars(module)[key]
                self._watch(f"{label}{_HOOKS}", functools.partial(tuple, hooks))
                self._enter_all(f"{label}{_HOOKS}", hooks.values())
            self._watch(f"{label}, its modules", module._modules.__len__)
            children = Entries(module._modules, ".{}")
            for key in module._modules:
                self._watch(children.label(label, key), children.reader(key), children, key)
            if not is_trained:
                self._watch(f"{label}.training", functools.partial(vars(module).get, "training"))
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        self._watch(f"{label}.{key}", parameter.data_ptr)
            above = (base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)
            if any(map(is_of_library, above)):
                self._enter_library_module(label, module)
            if not is_of_library(kind):
                self._look_up(*self._hold(label, module))
                self._watch_attributes(label, module)
            self._enter_space(label, Entries(module._buffers, ".{}"), module._buffers)

    def _watch_outline(self, label: str, module: nn.Module, root: nn.Module) -> None:
        """Watch class, mode and parameters of a module of a root (in subclasses)."""

    def _enter_library_module(self, label: str, module: nn.Module) -> None:
        own = Entries(vars(module), ".{}")
        for key in ["forward", *vars(module)]:
            if key not in OF_TORCH:
                self._watch(f"{label}.{key}", own.reader(key), own, key)

    def _enter_function(self, name: str, function: FunctionType) -> None:
        if (compiled := vars(function).get("_torchdynamo_orig_callable")) is not None:
            return self._enter(name, compiled)
        around, self._is_of_library = self._is_of_library, is_of_library(function)
        cells = ClosureCells(function)
        self._enter_space(name, cells, cells.keys())
        self._enter_all(name, defaults_of(function))
        self._is_of_library = around
        if is_of_library(function):
            return None
        self._watch_attributes(name, function)
        self._watch(f"{name}, its code", lambda: function.__code__)
        self._watch(f"{name}, its defaults", lambda: function.__defaults__)
        if function.__kwdefaults__:
            self._enter_container(f"{name}, its defaults", function.__kwdefaults__)
        self.names.update(names_of(function.__code__))
        self.names.update(text for text in texts(function.__code__) if text.isidentifier())
        return self._look_up(*self._hold(name, function))

    def _enter_container(self, name: str, container: Any) -> None:
        base: Any = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
        length = functools.partial(base.__len__, container)
        self._watch(name, length)
        if type(container) is not base and isinstance(own := own_attributes(container), dict):
            self._enter_container(name, own)
        if length() > LONGEST:
            entries = dict.values if base is dict else base.__iter__
            if all(isinstance(entry, PLAIN_TYPES) for entry in entries(container)):
                self._watch(name, lambda: tuple(entries(container)))
            else:
                self._close(f"{name} (of {length()} entries)")
        elif base in (dict, list):
            keys = list(base.__iter__(container)) if base is dict else range(length())
            self._enter_space(name, space_of(container), keys)
        else:
            self._enter_all(name, self._watch(name, lambda: tuple(base.__iter__(container))))

    def _hold(self, name: str, holder: Any) -> tuple[str, Any, list[HolderPlaces]]:
        """Register a holder: its attributes are looked up again whenever code is found that uses more names."""
        self._holders.append((name, holder, _spaces(holder)))
        return self._holders[-1]

    def _look_up_all(self) -> None:
        before = -1
        while before != len(self._looked_up) + len(self.names):  # late names are looked up in all holders
            before = len(self._looked_up) + len(self.names)
            for held in list(self._holders):
                self._look_up(*held)

    def _look_up(self, name: str, holder: Any, spaces: Sequence[HolderPlaces]) -> None:
        """Watch the attributes of a holder whose names code uses."""
        for place, space in enumerate(spaces):  # all bases: a method may call that of the next class
            for key in self._keys(holder, space):
                here = (id(holder), f"{place} {key}")
                if here in self._looked_up or isinstance(space.reader(key)(), MemberDescriptorType):
                    continue
                self._looked_up.add(here)
                is_theirs = isinstance(holder, ModuleType) and is_library_module(holder.__name__)
                (self._found_in_library if is_theirs else self._found)(name, space, key)
                if space is not spaces[0] and not isinstance(space, Slots):  # an instance attribute would shadow it
                    self._watch(f"{name}.{key}", spaces[0].reader(key), spaces[0], key)

    def _keys(self, holder: Any, space: HolderPlaces) -> Set[str]:
        """Return the names by which code may look up attributes of a holder in one of its spaces."""
        if isinstance(holder, FunctionType) and space.holder is holder.__globals__:
            return {*globals_of(holder.__code__), *texts(holder.__code__)} & space.holder.keys()
        return self.names.intersection(vars(space.holder) if isinstance(space, OfClass) else space.keys())

    def _found_in_library(self, name: str, space: HolderPlaces, key: str) -> None:
        value = space.reader(key)()
        if isinstance(value, ModuleType):
            self._enter(f"{name}.{key}", value)
        elif isinstance(value, PLAIN_TYPES) or callable(value):
            self._watch(f"{name}.{key}", space.reader(key), space, key)

    def _found(self, name: str, space: HolderPlaces, key: str) -> None:
        label, value = f"{name}.{key}", space.reader(key)()
        is_module = isinstance(value, ModuleType)
        self._enter(label, value if is_module else self._watch(label, space.reader(key), space, key))


def _level(logger: Logger) -> tuple[object, ...]:
    """Return the level of a logger and its switches, which code may query before it logs."""
    return Logger.getEffectiveLevel(logger), logger.disabled, logger.manager.disable


def _spaces(holder: Any) -> list[HolderPlaces]:
    """Return the spaces of a holder: instance attributes, user classes, slots; of a function also its globals."""
    if isinstance(holder, FunctionType):
        return [Entries(vars(holder), ".{}"), Entries(holder.__globals__, ".{}")]
    if isinstance(holder, ModuleType):
        return [Entries(vars(holder), ".{}")]
    kinds = [*(holder.__mro__ if isinstance(holder, type) else ()), *type(holder).__mro__]
    found: list[HolderPlaces] = [OfClass(base) for base in kinds if not is_of_library(base)]
    own = own_attributes(holder)
    if isinstance(holder, type):
        return found
    if isinstance(own, dict):
        found.insert(0, Entries(own, ".{}"))
    return [*found, Slots(holder, of_libraries=True)]


_ENTERED: tuple[tuple[Any, Callable[[HostState, str, Any], object]], ...] = (
    (Logger, lambda state, name, thing: state._watch(f"{name}, its level", functools.partial(_level, thing))),
    (Tensor, HostState._enter_tensor),
    (nn.Module, lambda state, name, thing: state._enter_module(name, thing)),
    (functools.partial, HostState._enter_partial),
    (FunctionType, lambda state, name, thing: state._enter_function(name, thing)),
    (_PASSED_ON, lambda state, name, thing: state._enter_all(name, (part for _, part in parts_of(thing) or ()))),
    (CONTAINERS, lambda state, name, thing: state._enter_container(name, thing)),
    (_NAMESPACES, lambda state, name, thing: state._enter_container(name, own_attributes(thing))),
    (MappingProxyType, lambda state, name, thing: state._enter_all(name, gc.get_referents(thing))),
    (ModuleType, lambda state, name, thing: state._hold(name, thing)),
)
"""Methods that enter an object, by its type: the first match is used."""
