"""Where things keep others: each place with its name in words, and how it is read, written and put back.

    dict, list, deque, set    entries     rates['a']    steps[0]
    object, module, class     attributes  Mixer.rate    in `__dict__` or `__slots__`; of a class those that are no code
    function                  cells       loss, scale
    module of Python          globals     RATE          of some names
    generator, array          all of it

Nothing of a user's is called: no property, no `__getattr__`, no iterator.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Set
from functools import _lru_cache_wrapper, cached_property, partial
from types import BuiltinMethodType, CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from torch import nn

from .host_values import GONE, content_of, entry_of, member_of
from .user_code import PLAIN, is_of_library, once_per_class

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
LONGEST = 1024
"""Entries of longer containers are not looked into."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_TORCH = frozenset(vars(nn.Module()))


class Space:
    """Places of one holder that are named alike.

    Attributes:
        holder: what has them.
        form: how one is called behind its holder's name.
    """

    def __init__(self, holder: Any, form: str = "[{}]") -> None:
        self.holder, self.form = holder, form

    def read(self) -> Mapping[Any, Any]:
        """Return what is in all places now."""
        raise NotImplementedError

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return what reads one place, or gives `GONE`."""
        raise NotImplementedError

    def write(self, key: Any, value: Any) -> None:
        """Put something into a place."""
        raise NotImplementedError

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Let the places have what `read` gave before."""
        raise NotImplementedError

    def label(self, name: str, key: Any) -> str:
        """Return what a place is called, where the holder is called by a name."""
        said = "…" if not isinstance(key, PLAIN) else repr(key) if self.form == "[{}]" else key
        return f"{name}{self.form.format(said)}"


class Entries(Space):
    """Entries of a dictionary, which may be the attributes of an object, or of some names alone."""

    def __init__(self, holder: dict[Any, Any], form: str = "[{}]", names: Set[str] | None = None) -> None:
        super().__init__(holder, form)
        self._names = names

    def read(self) -> Mapping[Any, Any]:
        """Return the dictionary itself, unless it is of some names."""
        if self._names is None:
            return self.holder  # type: ignore[no-any-return]
        return {name: self.holder[name] for name in sorted(self._names) if name in self.holder}

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return what reads an entry as no class of its own would."""
        return partial(dict.get, self.holder, key, GONE)

    def write(self, key: Any, value: Any) -> None:
        """Set an entry."""
        self.holder[key] = value

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Let the entries be those from before, in their order."""
        if self._names is None:
            self.holder.clear()
        else:
            for key in self.read().keys() - before.keys():
                del self.holder[key]
        self.holder.update(before)


class Items(Space):
    """Entries of a list, a deque or a set."""

    def read(self) -> Mapping[Any, Any]:
        """Return the entries by their places; of a set by themselves."""
        base = next(kind for kind in (list, deque, set) if isinstance(self.holder, kind))
        entries = list(base.__iter__(self.holder))
        return {entry: entry for entry in entries} if base is set else dict(enumerate(entries))

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return what reads an entry of a list."""
        return partial(entry_of, self.holder, key)

    def write(self, key: Any, value: Any) -> None:
        """Set an entry of a list."""
        self.holder[key] = value

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Fill it with what it had."""
        self.holder.clear()
        (self.holder.update if isinstance(self.holder, set) else self.holder.extend)(before.values())


class Cells(Space):
    """Variables around a function."""

    def __init__(self, holder: FunctionType) -> None:
        super().__init__(holder, ", {}")
        self.cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))

    def read(self) -> Mapping[Any, Any]:
        """Return those that are bound."""
        return {key: cell.cell_contents for key, cell in self.cells.items() if cell != CellType()}

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return what reads one."""
        return partial(content_of, self.cells[key])

    def write(self, key: Any, value: Any) -> None:
        """Bind one."""
        self.cells[key].cell_contents = value

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Bind those that were bound."""
        for key, value in before.items():
            self.write(key, value)


class Slots(Space):
    """What an object has in `__slots__`, of classes of users alone unless it is told which."""

    def __init__(self, holder: Any, slots: Mapping[str, MemberDescriptorType] | None = None) -> None:
        super().__init__(holder, ".{}")
        own = {key: slot for key, slot in slots_of(type(holder)).items() if not is_of_library(slot.__objclass__)}
        self.slots = own if slots is None else slots

    def read(self) -> Mapping[Any, Any]:
        """Return what is in those that are set."""
        found = {key: member_of(slot, self.holder) for key, slot in self.slots.items()}
        return {key: value for key, value in found.items() if value is not GONE}

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return what reads one."""
        return partial(member_of, self.slots[key], self.holder)

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        self.slots[key].__set__(self.holder, value)

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Set those that were set, and empty the others."""
        for key in self.read().keys() - before.keys():
            self.slots[key].__delete__(self.holder)
        for key, value in before.items():
            self.write(key, value)


class OfClass(Space):
    """Attributes of a class that are no code."""

    def __init__(self, holder: type) -> None:
        super().__init__(holder, ".{}")

    def read(self) -> Mapping[Any, Any]:
        """Return them as the class has them itself."""
        code = (FunctionType, type, staticmethod, classmethod, property, MemberDescriptorType)
        own = vars(self.holder).items()
        return {k: v for k, v in own if not isinstance(v, code) and not (k[:2] == "__" == k[-2:])}

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return what reads one."""
        return partial(vars(self.holder).get, key, GONE)

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        setattr(self.holder, key, value)

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Set those that were others, and delete what is new."""
        now = self.read()
        for key in now.keys() - before.keys():
            delattr(self.holder, key)
        for key, value in before.items():
            if now.get(key, GONE) is not value:
                self.write(key, value)


class Whole(Space):
    """All of something, such as where a generator is, in one place.

    Args:
        holder: the thing.
        read: returns what is compared.
        put: sets it as it was when this was made.
    """

    def __init__(self, holder: Any, read: Callable[[], Any], put: Callable[[], Any]) -> None:
        super().__init__(holder, "")
        self._read, self._put = read, put

    def read(self) -> Mapping[Any, Any]:
        """Return it under an empty key."""
        return {"": self._read()}

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Set it as it was."""
        self._put()


def space_of(container: Any) -> Space:
    """Return the entries of a dict, list, deque or set."""
    return Entries(container) if isinstance(container, dict) else Items(container)


def parts_of(thing: Any) -> list[tuple[str, Any]] | None:
    """Return what something that cannot be changed stands for, with its place in words; None: it is nothing such."""
    if isinstance(thing, tuple):
        return [(f"[{place}]", part) for place, part in enumerate(thing)]
    if isinstance(thing, partial):
        return [(f"[{k}]", part) for k, part in enumerate((thing.func, *thing.args, *thing.keywords.values()))]
    if isinstance(thing, MethodType):
        return [("", thing.__func__), ("", thing.__self__)]
    if isinstance(thing, weakref.ref):
        return [("()", thing())]
    held = stands_for(thing)
    return None if held is thing else [("", held)]


def stands_for(thing: Any) -> Any:
    """Return the function in a descriptor or a cache, what a builtin method is of, or the thing itself."""
    if isinstance(thing, BuiltinMethodType):
        return thing.__self__
    if isinstance(thing, _lru_cache_wrapper):
        return thing.__wrapped__
    if isinstance(thing, staticmethod | classmethod):
        return thing.__func__
    if isinstance(thing, property):
        return thing.fget
    return thing.func if isinstance(thing, cached_property) else thing


def defaults_of(function: FunctionType) -> tuple[Any, ...]:
    """Return the values of a function's arguments that have some."""
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def own_attributes(holder: Any) -> Any:
    """Return the dictionary of an object's attributes, as its class may hide it; None where there is none."""
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(holder, "__dict__")


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object by their names, those in `__slots__` too."""
    own = own_attributes(holder)
    return {**(own if isinstance(own, dict) else {}), **Slots(holder, slots_of(type(holder))).read()}


@once_per_class
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the `__slots__` of a class by their names, without asking a metaclass."""
    own = [vars(base) for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return {key: held for space in own for key, held in space.items() if isinstance(held, MemberDescriptorType)}
