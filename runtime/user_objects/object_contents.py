"""Places where Python objects hold others (spaces): each with a name in words, and how to read, write and restore it.

    dict, list, deque, set    entries     rates['a']    steps[0]
    object, module, class     attributes  Mixer.rate    in `__dict__` or `__slots__`; of a class those that are no code
    function                  cells       loss, scale
    module of Python          globals     RATE          of some names
    generator, array          all of it

No user code is called: no property, no `__getattr__`, no iterator.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from functools import _lru_cache_wrapper, cached_property, partial
from itertools import chain
from operator import attrgetter, delitem, setitem
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from .host_value_equality import GONE
from .library_or_user import PLAIN_TYPES, is_of_framework, is_of_library, is_ours, once_per_class

_CODE = (FunctionType, type, staticmethod, classmethod, property, MemberDescriptorType)
_STANDS_FOR = {BuiltinMethodType: "__self__", _lru_cache_wrapper: "__wrapped__", cached_property: "func"}
_STANDS_FOR |= {staticmethod: "__func__", classmethod: "__func__", property: "fget"}
_STAND = tuple(_STANDS_FOR)
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
LONGEST = 1024
"""Longest container whose entries are entered."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL = tuple(f"_global{name}" for name in HOOKS)
_OF_GRADIENT = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Dicts in which a torch module registers parameters, buffers and submodules."""
OF_TORCH = frozenset(vars(nn.Module()))


class HolderPlaces:
    """Places of one holder, of one kind.

    Attributes:
        holder: the object that has them.
        form: format of a place's name behind its holder's name.
        keys: returns the keys of the places.
        reader: returns a function that reads the place of a key, and returns `GONE` if it is empty.
        write: sets the place of a key; `GONE` empties it.
    """

    def __init__(
        self,
        holder: Any,
        form: str,
        keys: Callable[[], Iterable[Any]],
        reader: Callable[[Any], Callable[[], Any]],
        write: Callable[[Any, Any], None],
    ) -> None:
        self.holder, self.form = holder, form
        self.keys, self.reader, self.write = keys, reader, write

    def read_values(self) -> Mapping[Any, Any]:
        """Return the present values of all places."""
        found = [(key, self.reader(key)()) for key in self.keys()]
        return {key: value for key, value in found if value is not GONE}

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Restore the values that `read_values` returned before."""
        now = self.read_values()
        for key in {**before, **now}:
            if now.get(key, GONE) is not before.get(key, GONE):
                self.write(key, before.get(key, GONE))

    def label(self, name: str, key: Any) -> str:
        """Return the name of a place, given its holder's name."""
        said = "…" if not isinstance(key, PLAIN_TYPES) else repr(key) if self.form == "[{}]" else key
        return f"{name}{self.form.format(said)}"


def _put(owner: Any, key: Any, value: Any, put: Callable[..., object] = setattr, drop: Any = delattr) -> None:
    if value is GONE:
        drop(owner, key)
    else:
        put(owner, key, value)


class Entries(HolderPlaces):
    """Entries of a dict, which may be the `__dict__` of an object; with `names`, only these: globals of a module.

    A snapshot has very many of these, so they define methods instead of holding functions of their own.
    """

    def __init__(self, holder: dict[Any, Any], form: str = "[{}]", names: Set[str] | None = None) -> None:
        self.holder, self.form, self.names = holder, form, names

    def keys(self) -> Iterable[Any]:
        """Return the keys of the dict, or those of `names` that it has."""
        return self.holder.keys() if self.names is None else sorted(self.names & self.holder.keys())

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return a function that reads an entry."""
        return partial(dict.get, self.holder, key, GONE)

    def write(self, key: Any, value: Any) -> None:
        """Set an entry, or delete it."""
        _put(self.holder, key, value, setitem, delitem)

    def read_values(self) -> Mapping[Any, Any]:
        """Return the dict itself, or the entries of `names`."""
        return self.holder if self.names is None else super().read_values()

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Restore the entries from before, in their order."""
        if self.names is not None:
            return super().put_back(before)
        self.holder.clear()  # restores the order too
        self.holder.update(before)
        return None


class Items(HolderPlaces):
    """Entries of a list or deque by index; of a set by themselves."""

    def __init__(self, holder: Any) -> None:
        read = partial(partial, _entry_of, holder)
        super().__init__(holder, "[{}]", lambda: range(len(holder)), read, partial(setitem, holder))

    def read_values(self) -> Mapping[Any, Any]:
        """Return all entries."""
        return {entry: entry for entry in self.holder} if isinstance(self.holder, set) else dict(enumerate(self.holder))

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Restore the entries in place."""
        self.holder.clear()
        (self.holder.update if isinstance(self.holder, set) else self.holder.extend)(before.values())


class ClosureCells(HolderPlaces):
    """Closure variables of a function by name; `cells` has the cell of each, which other functions may share."""

    def __init__(self, holder: FunctionType) -> None:
        self.cells = cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
        super().__init__(
            holder,
            ", {}",
            cells.keys,
            lambda key: partial(_content_of, cells[key]),
            lambda key, value: _put(cells[key], "cell_contents", value),
        )


class Slots(HolderPlaces):
    """Attributes in `__slots__`, of user classes alone or of all bases."""

    def __init__(self, holder: Any, *, of_libraries: bool = False) -> None:
        found = slots_of(type(holder)).items()
        slots = {key: slot for key, slot in found if of_libraries or not is_of_library(slot.__objclass__)}
        put, drop = MemberDescriptorType.__set__, MemberDescriptorType.__delete__
        super().__init__(
            holder,
            ".{}",
            slots.keys,
            lambda key: partial(_member_of, slots[key], holder),
            lambda key, value: _put(slots[key], holder, value, put, drop),
        )


class OfClass(HolderPlaces):
    """Attributes of a class that are no code."""

    def __init__(self, holder: type) -> None:
        super().__init__(
            holder, ".{}", self._no_code, lambda key: partial(vars(holder).get, key, GONE), partial(_put, holder)
        )

    def _no_code(self) -> list[str]:
        own = vars(self.holder).items()
        return [key for key, value in own if not isinstance(value, _CODE) and not (key[:2] == "__" == key[-2:])]


class Whole(HolderPlaces):
    """State of an object as one place, such as a generator's; `put` restores the state at construction."""

    def __init__(self, holder: Any, read: Callable[[], Any], put: Callable[[], Any]) -> None:
        super().__init__(holder, "", lambda: ("",), lambda key: read, lambda key, value: put())


class Trained(HolderPlaces):
    """The flag `requires_grad` of a weight."""

    def __init__(self, holder: Tensor) -> None:
        self.holder, self.form, self.write = holder, ".{}", partial(_put, holder)

    def read_values(self) -> Mapping[Any, Any]:
        """Return the flag by its name."""
        return {"requires_grad": self.holder.requires_grad}


def space_of(container: Any) -> HolderPlaces:
    """Return the entries of a dict, list, deque or set."""
    return Entries(container) if isinstance(container, dict) else Items(container)


def parts_of(thing: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of an immutable wrapper (tuple, partial, method, weak reference, …), with names; else None."""
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
    """Return the function of a descriptor or cache, the owner of a builtin method, or else the object itself."""
    if not isinstance(thing, _STAND):
        return thing
    return next(getattr(thing, name) for kind, name in _STANDS_FOR.items() if isinstance(thing, kind))


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks."""
    return any(vars(module)[key] for key in HOOKS)


def forward_hooks(thing: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of forward hooks that see a module's inputs: its own, its submodules', and the global ones."""
    own = [vars(module)[key] for module in thing.modules() for key in HOOKS[:2]]
    return [*own, *[vars(global_hooks)[key] for key in HOOKS_OF_ALL[:2]]]


def hooks_on(*weights: Tensor) -> list[Any]:
    """Return the gradient hooks of weights: they receive whole gradients."""
    held = filter(None, chain.from_iterable(map(_OF_GRADIENT, weights)))
    return [*chain.from_iterable(map(dict.values, held))]


def is_of_torch(thing: Any) -> bool:
    """Return whether a block or function is torch's own throughout, without hooks: it contains no user code."""
    if not isinstance(thing, nn.Module):
        return isinstance(thing, FunctionType) and is_of_framework(thing)
    for module in thing.modules():
        for key, held in vars(module).items():
            is_no_code = isinstance(held, PLAIN_TYPES) or (type(held) in CONTAINERS and not held) or key in REGISTRIES
            if not is_no_code and not (type(held) is tuple and {*map(type, held)} <= {*PLAIN_TYPES}):
                return False
    if any(map(vars(global_hooks).__getitem__, HOOKS_OF_ALL)) or not all(map(is_ours, hooks_on(*thing.parameters()))):
        return False
    return all(map(is_of_framework, {*map(type, thing.modules())}))


def defaults_of(function: FunctionType) -> tuple[Any, ...]:
    """Return the default values of a function's arguments."""
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def own_attributes(holder: Any) -> Any:
    """Return the `__dict__` of an object, even if its class overrides attribute access; None if it has none."""
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(holder, "__dict__")


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, those in `__slots__` included."""
    own = own_attributes(holder)
    return {**(own if isinstance(own, dict) else {}), **Slots(holder, of_libraries=True).read_values()}


@once_per_class
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the slot descriptors of a class by name, without calling its metaclass."""
    own = [vars(base) for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return {key: held for space in own for key, held in space.items() if isinstance(held, MemberDescriptorType)}


def _content_of(cell: Any) -> Any:
    """Return the content of a closure cell, or `GONE`."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return GONE


def _entry_of(container: list[Any], place: int) -> Any:
    """Return the entry of a list at an index, or `GONE`."""
    return list.__getitem__(container, place) if place < list.__len__(container) else GONE


def _member_of(slot: MemberDescriptorType, holder: Any) -> Any:
    """Return the value of an object's slot, or `GONE`."""
    try:
        return slot.__get__(holder)
    except AttributeError:
        return GONE
