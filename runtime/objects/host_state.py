"""What blocks and functions go by on the host: all that their code names, watched from step to step.

    state = HostState({"block 2": block}, {"the loss function": loss_fn})
    state.changed()        "block 2 (Mixer).rate": it is no longer what it was; None: all is
    state.tensors()        tensors among it, which code may change in place

    code        forward, the functions, and what these name
    values      attributes, closures and globals of the names in that code, or of the strings in it: numbers, strings,
                flags, and tuples of these; objects by identity
    containers  of what is found: how long they are, and their entries, if these are few
    generators  where they are; arrays: their bytes, if these are few
    modules     their hooks, their modules, and where weights are of those that are not trained; libraries': attributes

Anything else of libraries' is not looked into; nothing of a user's is called.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from _thread import LockType, RLock
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import (
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from .host_values import GONE, OPERATORS, content_of, entry_of, is_same, member_of, state_of, word
from .plain_code import has_known_content, only_tells
from .user_code import PLAIN, is_library_module, is_of_library, names_of, once_per_class, texts

LONGEST = 1024
"""So many entries of a container are watched."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, WeakKeyDictionary, WeakValueDictionary)
_STILL = (*PLAIN, LockType, RLock, torch.jit.ScriptFunction)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_FUNCTIONS = ("backward", "setup_context", "vjp", "jvp")
"""What torch calls of an autograd Function besides its forward."""
OF_TORCH = frozenset(vars(nn.Module()))


class _Slot(NamedTuple):
    """A place of the host: its name, what reads it, and what it read first."""

    name: str
    read: Callable[[], Any]
    seen: Any

    @property
    def counts_entries(self) -> bool:
        """Whether it is how long a container is."""
        return getattr(getattr(self.read, "func", None), "__name__", "") == "__len__"

    def write(self, value: Any) -> bool:
        """Put something there; return whether it can be."""
        function: Any = getattr(self.read, "func", None)
        given: Sequence[Any] = getattr(self.read, "args", ())
        space = given[0] if function is dict.get else getattr(function, "__self__", None)
        if isinstance(space, dict):
            space[given[-2]] = value
        elif function is entry_of:
            given[0][given[1]] = value
        elif function is content_of:
            given[0].cell_contents = value
        elif function is member_of:
            given[0].__set__(given[1], value)
        else:
            return False
        return True


class HostState:
    """The host's part of what modules and functions work with, as it is now.

    Args:
        modules: roots by their names.
        functions: what else is called, by names.
        inner: whether the modules in a root are watched as well.
        beside: modules by names of which only the attributes are watched that code of the others names.

    Attributes:
        unseen: the name and the kind of something among it of which nobody can tell what is in it; None: there is none.
        names: the names that the code names.
    """

    _most = 20_000
    """So many values are watched."""

    _is_of_library = False
    """Whether what is looked into is what a library's function keeps."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        functions: Mapping[str, Any],
        *,
        inner: bool = True,
        beside: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self.unseen: str | None = None
        self._inner = inner
        self._slots: list[_Slot] = []
        self.names = {
            "forward",
            *OF_FUNCTIONS,
            *map("__{}__".format, (*OPERATORS, "get", "getattribute", "eq", "hash")),
        }
        self._known: dict[int, Any] = {}
        self._holders: list[tuple[str, Any]] = []
        self._looked_up: set[tuple[int, str]] = set()
        self._tensors: dict[int, Tensor] = {}
        for name, root in modules.items():
            self._enter_module(name, root, is_trained=True)
        for name, function in functions.items():
            self._enter(name, function)
        self._look_up_all()
        for name, module in beside.items():
            own = vars(module)
            for key in self.names & (own.keys() - OF_TORCH):
                self._found(f"{name} ({type(module).__name__}).{key}", functools.partial(own.get, key, GONE))
        self._look_up_all()

    @property
    def is_whole(self) -> bool:
        """Whether all is watched: there is no more of it than can be."""
        return len(self._slots) < self._most

    def changed(self) -> str | None:
        """Return the name of the first thing that is not as it was; None where all is."""
        return next((slot.name for slot in self.moved()), None)

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each thing that is not as it was, and what was seen and is there now."""
        return ((slot.name, slot.seen, slot.read()) for slot in self.moved())

    def moved(self, slots: Sequence[_Slot] | None = None) -> Iterator[_Slot]:
        """Yield the places, all or some, that have something else than was seen."""
        for slot in self._slots if slots is None else slots:
            _, read, seen = slot
            now = read()
            if now is not seen and not is_same(now, seen):
                now = self._seen(now)
                if now is not seen and not is_same(now, seen):
                    yield slot

    def words(self) -> tuple[str, ...]:
        """Return what was seen in words: two that have the same do the same, as far as can be said."""
        return tuple(f"{slot.name} {word(slot.seen)}" for slot in self._slots)

    def let_go(self) -> None:
        """Hold no more of what is watched than the places where it is; nothing new is found from now on."""
        self._known.clear()
        self._holders.clear()

    def tensors(self) -> list[Tensor]:
        """Return the tensors among it, buffers of modules too, but for their weights."""
        return list(self._tensors.values())

    def _watch(self, name: str, read: Callable[[], Any]) -> Any:
        """Watch a place, and return what is there."""
        found = read()
        if len(self._slots) < self._most:
            self._slots.append(_Slot(name, read, self._seen(found)))
        return found

    def _seen(self, value: Any) -> Any:
        """Return what is kept of a value, and compared."""
        return value

    def _enter(self, name: str, thing: Any) -> None:
        """Look into something that code finds under a name."""
        if isinstance(thing, _STILL) or id(thing) in self._known or len(self._known) > self._most:
            return
        self._known[id(thing)] = thing
        if isinstance(thing, Tensor):
            self._watch(name, thing.data_ptr)
            self._tensors[id(thing)] = thing
        elif isinstance(thing, nn.Module):
            self._enter_module(name, thing)
        elif isinstance(thing, functools.partial):
            self._enter_all(name, self._watch(name, lambda: (thing.func, *thing.args)))
            self._enter_container(name, thing.keywords)
        elif isinstance(thing, MethodType):
            self._enter(name, thing.__func__)
            self._enter(name, thing.__self__)
        elif isinstance(thing, FunctionType):
            self._enter_function(name, thing)
        elif isinstance(thing, staticmethod | classmethod | property):
            self._enter(name, thing.fget if isinstance(thing, property) else thing.__func__)
        elif isinstance(thing, tuple):
            self._enter_all(name, thing)
        elif isinstance(thing, _CONTAINERS):
            self._enter_container(name, thing)
        elif isinstance(thing, _NAMESPACES):
            self._enter_container(name, own_attributes(thing))
        elif isinstance(thing, MappingProxyType):
            self._enter_all(name, gc.get_referents(thing))
        elif isinstance(thing, ModuleType):
            self._holders.append((name, thing))
        elif (state := state_of(thing)) is not None:
            self._watch(name, state)
        elif isinstance(thing, functools._lru_cache_wrapper):
            self._watch(name, lambda: thing.cache_info()[1::2])
            self._enter(name, thing.__wrapped__)
        elif isinstance(thing, np.ndarray) or not has_known_content(thing):
            self._close(f"{name} ({type(thing).__module__}.{type(thing).__qualname__})")
        elif not is_of_library(thing if isinstance(thing, type) else type(thing)):
            self._holders.append((name, thing))
            self._look_up(name, thing)
            self._watch_attributes(name, thing)
        else:
            self._enter_foreign(name, thing)

    def _enter_foreign(self, name: str, thing: Any) -> None:
        """Look into something of a library: what code names of it."""
        if not isinstance(thing, type) and not only_tells(thing):
            self._holders.append((name, thing))
            self._look_up(name, thing)

    def _close(self, name: str) -> None:
        """Note something of which nobody can tell what is in it, where users' code goes by it."""
        if not self._is_of_library:
            self.unseen = self.unseen or name

    def _watch_attributes(self, name: str, holder: Any) -> None:
        """Watch how many attributes a holder has."""

    def _enter_all(self, name: str, things: Iterable[Any]) -> None:
        for thing in things:
            self._enter(name, thing)

    def _enter_module(self, name: str, root: nn.Module, *, is_trained: bool = False) -> None:
        for inner, module in root.named_modules() if self._inner else [("", root)]:
            kind = type(module)
            label = f"{name}{inner and '.'}{inner} ({kind.__name__})"
            self._known[id(module)] = module
            self._watch_outline(label, module, root)
            for key in HOOKS:
                hooks = vars(module)[key]
                self._watch(f"{label}, its hooks", functools.partial(tuple, hooks))
                self._enter_all(f"{label}, its hooks", hooks.values())
            self._watch(f"{label}, its modules", module._modules.__len__)
            for key in module._modules:
                self._watch(f"{label}.{key}", functools.partial(module._modules.get, key, GONE))
            if not is_trained:
                self._watch(f"{label}.training", functools.partial(vars(module).get, "training"))
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        self._watch(f"{label}.{key}", parameter.data_ptr)
            if any(base is not nn.Module and is_of_library(base) for base in _module_classes(kind)):
                self._enter_library_module(label, module)
            if not is_of_library(kind):
                self._holders.append((label, module))
                self._look_up(label, module)
                self._watch_attributes(label, module)
            for key in module._buffers:
                read = functools.partial(module._buffers.get, key, GONE)
                self._enter(f"{label}.{key}", self._watch(f"{label}.{key}", read))

    def _watch_outline(self, label: str, module: nn.Module, root: nn.Module) -> None:
        """Watch what a module of a root is."""

    def _enter_library_module(self, label: str, module: nn.Module) -> None:
        for key in ["forward", *vars(module)]:
            if key not in OF_TORCH:
                self._watch(f"{label}.{key}", functools.partial(vars(module).get, key, GONE))

    def _enter_function(self, name: str, function: FunctionType) -> None:
        around, self._is_of_library = self._is_of_library, is_of_library(function)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._enter(f"{name}, {key}", self._watch(f"{name}, {key}", functools.partial(content_of, cell)))
        self._enter_all(name, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        self._is_of_library = around
        if is_of_library(function):
            return
        self._watch_attributes(name, function)
        self._watch(f"{name}, its code", lambda: function.__code__)
        self._watch(f"{name}, its defaults", lambda: function.__defaults__)
        if function.__kwdefaults__:
            self._enter_container(f"{name}, its defaults", function.__kwdefaults__)
        self.names.update(names_of(function.__code__))
        self.names.update(text for text in texts(function.__code__) if text.isidentifier())
        self._holders.append((name, function))
        self._look_up(name, function)

    def _enter_container(self, name: str, container: Any) -> None:
        base: Any = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
        length = functools.partial(base.__len__, container)
        self._watch(name, length)
        if type(container) is not base and isinstance(own := own_attributes(container), dict) and own:
            self._enter_container(name, own)
        if length() > LONGEST:
            entries = dict.values if base is dict else base.__iter__
            if all(isinstance(entry, PLAIN) for entry in entries(container)):
                self._watch(name, lambda: tuple(entries(container)))
            else:
                self._close(f"{name} (of {length()} entries)")
        elif base is dict:
            for key in list(dict.keys(container)):
                label = f"{name}[{key!r}]" if isinstance(key, PLAIN) else f"{name}[…]"
                self._enter(label, self._watch(label, functools.partial(dict.get, container, key, GONE)))
        elif base is list:
            for place in range(length()):
                label = f"{name}[{place}]"
                self._enter(label, self._watch(label, functools.partial(entry_of, container, place)))
        else:
            entries = list(base.__iter__(container))
            if all(isinstance(entry, PLAIN) for entry in entries):
                self._watch(name, lambda: tuple(base.__iter__(container)))
            self._enter_all(name, entries)

    def _look_up_all(self) -> None:
        before = -1
        while before != len(self._looked_up) + len(self.names):  # names found late are looked up everywhere
            before = len(self._looked_up) + len(self.names)
            for name, holder in list(self._holders):
                self._look_up(name, holder)

    def _look_up(self, name: str, holder: Any) -> None:
        """Watch what a holder has under the names that code names."""
        spaces = _spaces(holder)
        for place, space in enumerate(spaces):  # a method of a class may call that of the next
            for key in self._keys(holder, space):
                here = (id(holder), f"{place} {key}")
                if here not in self._looked_up and not isinstance(space[key], MemberDescriptorType):
                    self._looked_up.add(here)
                    is_theirs = isinstance(holder, ModuleType) and is_library_module(holder.__name__)
                    found = self._found_in_library if is_theirs else self._found
                    found(f"{name}.{key}", functools.partial(space.get, key, GONE))
                    if space is not spaces[0]:  # its own would come before it
                        self._watch(f"{name}.{key}", functools.partial(spaces[0].get, key, GONE))
        for key, slot in () if isinstance(holder, FunctionType | type | ModuleType) else _slots_of(type(holder)):
            if key in self.names and (id(holder), key) not in self._looked_up:
                self._looked_up.add((id(holder), key))
                self._found(f"{name}.{key}", functools.partial(member_of, slot, holder))

    def _keys(self, holder: Any, space: Mapping[str, Any]) -> Set[str]:
        """Return under which names code may look something up that a holder has in one of its spaces."""
        return self.names & space.keys()

    def _found_in_library(self, name: str, read: Callable[[], Any]) -> None:
        value = read()
        if isinstance(value, ModuleType):
            self._enter(name, value)
        elif isinstance(value, PLAIN) or callable(value):
            self._watch(name, read)

    def _found(self, name: str, read: Callable[[], Any]) -> None:
        value = read()
        is_code = isinstance(value, FunctionType | type | staticmethod | classmethod | property)
        self._enter(
            name,
            value if isinstance(value, ModuleType) or (is_code and is_of_library(value)) else self._watch(name, read),
        )


def _spaces(holder: Any) -> list[Mapping[str, Any]]:
    """Return where a holder's attributes are: its own, and those of its user's classes; globals, of a function."""
    if isinstance(holder, FunctionType):
        return [vars(holder), holder.__globals__]
    if isinstance(holder, ModuleType):
        return [vars(holder)]
    kinds = [*(holder.__mro__ if isinstance(holder, type) else ()), *type(holder).__mro__]
    of_classes: list[Mapping[str, Any]] = [vars(base) for base in kinds if not is_of_library(base)]
    own = own_attributes(holder)
    return of_classes if isinstance(holder, type) or not isinstance(own, dict) else [own, *of_classes]


def own_attributes(holder: Any) -> Any:
    """Return the dictionary of an object's attributes, as its class may hide it; None where there is none."""
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(holder, "__dict__")


def _module_classes(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if issubclass(base, nn.Module)]


@once_per_class
def _slots_of(kind: type) -> list[tuple[str, MemberDescriptorType]]:
    """Return the `__slots__` of a class by their names, without asking a metaclass."""
    found = {key: held for base in reversed(kind.__mro__) for key, held in vars(base).items()}
    return [(key, held) for key, held in found.items() if isinstance(held, MemberDescriptorType)]
