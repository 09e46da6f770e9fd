"""What steers code of blocks besides numbers that are followed, watched from step to step, and what nobody can compare.

state = SteeringState({"block 2": block})
state.changed()        "block 2 (Mixer).rate", as `HostState` has it, whose watching this is; and besides

attributes  how many there are: names that code looks up in vain count
modules     classes, modes, weights that are frozen; of libraries also what is in attributes, and plain ones of classes
libraries   plain values of their modules, of the names in code; attributes of objects
tensors     attributes that users put on weights and buffers, of the names in code
torch       where `around`: hooks of all modules, and modes and hooks of saved tensors that a loop enters around a step
names       strings that are found, by which code may look something up

state.unseen           "block 2 (Mixer).table": an object of unknown content, or a tensor that is none of a module's
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping, Set
from logging import Logger
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .host_state import LONGEST, OF_TORCH, HostState, own_attributes
from .host_values import (
    GONE,
    INSTEAD,
    content_of,
    entry_of,
    marks_of,
    member_of,
    state_of,
    without_numbers,
)
from .plain_code import asked_of, has_known_content, only_tells
from .user_code import (
    PLAIN,
    is_library_module,
    is_of_framework,
    names_of,
    texts,
)

_OF_MODULES = (*PLAIN, tuple, dict, list, set, ModuleType, BuiltinFunctionType)
_BY_ANY_NAME = {"getattr", "vars", "__dict__", "attrgetter"}
_HOOKS_OF_ALL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class SteeringState(HostState):
    """What code of modules and functions goes by, as it is now, but for numbers of tensors and of torch's generators.

    `inner`: whether the modules in these are watched as well; `around`: returns the modes that are entered, where these
    and hooks of all modules are watched too.

    Attributes:
        of_users: places of plain values that users' code may set, but for those in modules of libraries.
        unseen: the name of the first thing that users' code goes by and nobody can tell whether it has changed.
    """

    _most = 200_000

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        functions: Mapping[str, Any] = MappingProxyType({}),
        *,
        inner: bool = True,
        around: Callable[[], object] | None = None,
    ) -> None:
        self._outlined: list[tuple[str, nn.Module]] = []
        self._of_libraries = set[str]()
        super().__init__(modules, functions, inner=inner)
        outlined = [(label, module) for label, module in self._outlined if module._parameters or module._buffers]
        for label, module in outlined:
            self._enter_all(label, _marks(module, self.names))
        if around is not None:
            for key in _HOOKS_OF_ALL:
                hooks: Mapping[int, Any] = vars(nn.modules.module)[key]
                read = functools.partial(tuple, hooks.values())
                self._enter_all(key, self._watch(f"torch.nn.modules.module.{key}", read))
            self._watch("modes and hooks of saved tensors around the step", around)
        self._look_up_all()
        for label, module in outlined:
            self._watch(f"{label}, attributes of its tensors", functools.partial(_marks, module, self.names))
        plain = (slot for slot in self._slots if isinstance(slot.seen, PLAIN) and slot.name not in self._of_libraries)
        self.of_users = [slot for slot in plain if _is_set_by_name(slot.read)]
        if not self.is_whole:
            self._close("more than can be watched")

    def let_go(self) -> None:
        """Hold no more of what is watched than the places where it is; nothing new is found from now on."""
        super().let_go()
        self._tensors.clear()

    def _seen(self, value: Any) -> Any:
        return value.removeprefix(INSTEAD) if isinstance(value, str) else without_numbers(value)

    def _enter(self, name: str, thing: Any) -> None:
        if isinstance(thing, str):
            self.names.add(thing)
        elif isinstance(thing, PLAIN) or id(thing) in self._known:
            return
        elif only_tells(thing):
            self._known[id(thing)] = thing
            self._watch(f"{name}, its level", functools.partial(_level, thing))
        elif isinstance(thing, Tensor) or not has_known_content(thing):
            self._close(name)
        elif isinstance(thing, functools.cached_property):
            self._enter(name, thing.func)
        elif isinstance(thing, ModuleType):
            self._known[id(thing)] = thing
            self._holders.append((name, thing))
        elif not isinstance(thing, torch.Generator):
            super()._enter(name, thing)

    def _enter_foreign(self, name: str, thing: Any) -> None:
        if isinstance(thing, BuiltinFunctionType) and asked_of(thing):
            self._close(name)
        elif isinstance(thing, BuiltinFunctionType | MethodWrapperType):
            self._enter(name, None if isinstance(thing.__self__, ModuleType) else thing.__self__)
        elif isinstance(thing, np.ndarray) and state_of(thing) is None:
            self._close(name)
        elif not isinstance(thing, type) and isinstance(own := own_attributes(thing), dict):
            is_of_python = type(thing).__module__.partition(".")[0] in sys.stdlib_module_names
            if is_of_python or not is_of_framework(type(thing)):
                self._enter_container(name, own)

    def _watch_attributes(self, name: str, holder: Any) -> None:
        if isinstance(own := own_attributes(holder), dict):
            self._watch(f"{name}, its attributes", functools.partial(dict.__len__, own))

    def _watch_outline(self, label: str, module: nn.Module, root: nn.Module) -> None:
        self._outlined.append((label, module))
        for held in (*vars(module).values(), *module._buffers.values()):
            if isinstance(held, Tensor):
                self._known[id(held)] = self._tensors[id(held)] = held
        self._watch(f"{label}, its class", functools.partial(type, module))
        self._watch(f"{label}, its mode", functools.partial(_mode, module, root, [True]))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                self._watch(f"{label}.{key}", functools.partial(getattr, parameter, "requires_grad"))

    def _enter_library_module(self, label: str, module: nn.Module) -> None:
        if type(module).__module__.startswith("quintsched."):
            return
        around, self._is_of_library, before = self._is_of_library, True, len(self._slots)
        for key in ["forward", *vars(module)]:
            if key not in OF_TORCH:
                read = functools.partial(vars(module).get, key, GONE)
                self._enter(f"{label}.{key}", self._watch(f"{label}.{key}", read))
        for base in type(module).__mro__:
            plain = [key for key, value in vars(base).items() if isinstance(value, PLAIN) and not key.startswith("_")]
            for key in () if is_of_framework(base) else plain:
                self._watch(f"{base.__name__}.{key}", functools.partial(vars(base).get, key, GONE))
        self._is_of_library = around
        self._of_libraries.update(slot.name for slot in self._slots[before:])

    def _enter_function(self, name: str, function: FunctionType) -> None:
        if (compiled := vars(function).get("_torchdynamo_orig_callable")) is not None:
            self._enter(name, compiled)
        else:
            super()._enter_function(name, function)

    def _enter_container(self, name: str, container: Any) -> None:
        super()._enter_container(name, container)
        kind: Any = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
        if kind.__len__(container) > LONGEST:
            self._close(name)
        elif kind is dict:
            self._enter_all(f"a key of {name}", list(dict.keys(container)))
        elif kind is not list:
            self._watch(name, lambda: tuple(kind.__iter__(container)))

    def _keys(self, holder: Any, space: Mapping[str, Any]) -> Set[str]:
        """Return the names that code names: of a function's globals its own; all attributes where it makes up names."""
        if isinstance(holder, FunctionType) and space is holder.__globals__:
            return {*names_of(holder.__code__), *texts(holder.__code__)} & space.keys()
        found = super()._keys(holder, space)
        if isinstance(holder, ModuleType) and is_library_module(holder.__name__):
            return {key for key in found if isinstance(space[key], _OF_MODULES)}
        if not isinstance(holder, ModuleType | type) and space is own_attributes(holder) and self.names & _BY_ANY_NAME:
            return set(space) - OF_TORCH
        return found

    def _found_in_library(self, name: str, read: Callable[[], Any]) -> None:
        self._found(name, read)

    def _found(self, name: str, read: Callable[[], Any]) -> None:
        self._enter(name, read() if isinstance(read(), ModuleType) else self._watch(name, read))


def _is_set_by_name(read: Callable[[], Any]) -> bool:
    """Whether a place is one in a dictionary, a list, a closure or a slot."""
    function: Any = getattr(read, "func", None)
    is_get = getattr(function, "__name__", "") == "get" and getattr(read, "args", ())[-1:] != ("training",)
    return is_get or function in (entry_of, content_of, member_of)


def _level(logger: Logger) -> tuple[object, ...]:
    """Return what a logger lets through, by which code may ask before it tells something."""
    return Logger.getEffectiveLevel(logger), logger.disabled, logger.manager.disable


def _mode(module: nn.Module, root: nn.Module, known: list[bool]) -> bool:
    """Return whether a module trains where the whole does, as it was the last time that this did."""
    known[0] = module.training if root.training else known[0]
    return known[0]


def _marks(module: nn.Module, names: Set[str]) -> tuple[Any, ...]:
    """Return the attributes of a module's tensors that code names, by the names of both."""
    held = (*module._parameters.items(), *module._buffers.items())
    marks = [(key, own) for key, tensor in held if tensor is not None and (own := marks_of(tensor))]
    is_named = names.__contains__ if names.isdisjoint(_BY_ANY_NAME) else lambda name: True
    return tuple((key, name, value) for key, own in marks for name, value in own.items() if is_named(name))
