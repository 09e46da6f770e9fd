"""Host state that steers the code of blocks, compared from step to step; tensors' numbers are followed elsewhere.

state = SteeringState({"block 2": block})
state.changed()        "block 2 (Mixer).rate": a `HostState`, which watches more:

attributes  their number: names that code looks up in vain count
modules     classes, modes, requires_grad of weights; of library modules also attributes, and plain class attributes
libraries   plain values in their Python modules, of the names in code; attributes of their objects
tensors     attributes that users set on weights and buffers, of the names in code
torch       where `around`: global module hooks, and modes and saved-tensor hooks that a loop enters around a step
names       strings that are found, by which code may look up attributes

state.unseen           "block 2 (Mixer).table": an object of unknown content, or a tensor that no module registers
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping, Set
from types import BuiltinFunctionType, MappingProxyType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .find_impure_code import asked_of, has_known_content, only_tells
from .host_state import HostState
from .host_value_equality import INSTEAD, marks_of, state_of, without_numbers
from .library_or_user import PLAIN_TYPES, is_library_module, is_of_framework, is_ours
from .object_contents import HOOKS_OF_ALL, LONGEST, OF_TORCH, Entries, HolderPlaces, OfClass, own_attributes

_OF_MODULES = (*PLAIN_TYPES, tuple, dict, list, set, ModuleType, BuiltinFunctionType)
_BY_ANY_NAME = {"getattr", "vars", "__dict__", "attrgetter"}


class SteeringState(HostState):
    """Host state that code of modules and functions depends on, without numbers of tensors and torch generators.

    `inner`: whether submodules are watched as well; `around`: returns the active modes, which are watched then, with
    global module hooks.

    Attributes:
        of_users: places of plain values that user code may set, those of library modules left out.
        unseen: the name of the first object that user code depends on and that cannot be compared.
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
            for key in HOOKS_OF_ALL:
                hooks: Mapping[int, Any] = vars(nn.modules.module)[key]
                read = functools.partial(tuple, hooks.values())
                self._enter_all(key, self._watch(f"torch.nn.modules.module.{key}", read))
            self._watch("modes and hooks of saved tensors around the step", around)
        self._look_up_all()
        for label, module in outlined:
            self._watch(f"{label}, attributes of its tensors", functools.partial(_marks, module, self.names))
        plain = (place for place in self.places if isinstance(place.seen, PLAIN_TYPES) and place.space is not None)
        self.of_users = [place for place in plain if place.name not in self._of_libraries]
        if not self.is_whole:
            self._close("more than can be watched")

    def let_go(self) -> None:
        """Drop the references to visited objects; the watched places stay, and no new ones are found from now on."""
        super().let_go()
        self._tensors.clear()

    def _seen(self, value: Any) -> Any:
        return value.removeprefix(INSTEAD) if isinstance(value, str) else without_numbers(value)

    def _enter(self, name: str, thing: Any) -> None:
        if isinstance(thing, str):
            self.names.add(thing)
        elif isinstance(thing, PLAIN_TYPES) or id(thing) in self._known:
            return
        elif isinstance(thing, Tensor) or not (has_known_content(thing) or only_tells(thing)):
            self._close(name)
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
        if is_ours(type(module)):
            return
        around, self._is_of_library, before = self._is_of_library, True, len(self.places)
        own = (key for key in ["forward", *vars(module)] if key not in OF_TORCH)
        self._enter_space(label, Entries(vars(module), ".{}"), own)
        for base in type(module).__mro__:
            if not is_of_framework(base):
                space, public = OfClass(base), (key for key in vars(base) if not key.startswith("_"))
                for key in [key for key in public if isinstance(vars(base)[key], PLAIN_TYPES)]:
                    self._watch(f"{base.__name__}.{key}", space.reader(key), space, key)
        self._is_of_library = around
        self._of_libraries.update(place.name for place in self.places[before:])

    def _enter_container(self, name: str, container: Any) -> None:
        super()._enter_container(name, container)
        kind: Any = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
        if kind.__len__(container) > LONGEST:
            self._close(name)
        elif kind is dict:
            self._enter_all(f"a key of {name}", list(dict.keys(container)))

    def _keys(self, holder: Any, space: HolderPlaces) -> Set[str]:
        """Return the names that code uses, or all attributes where code computes names (getattr, vars)."""
        found = super()._keys(holder, space)
        if isinstance(holder, ModuleType) and is_library_module(holder.__name__):
            return {key for key in found if isinstance(space.holder[key], _OF_MODULES)}
        if not isinstance(holder, ModuleType) and space.holder is own_attributes(holder):
            return set(space.holder) - OF_TORCH if self.names & _BY_ANY_NAME else found
        return found

    def _found_in_library(self, name: str, space: HolderPlaces, key: str) -> None:
        self._found(name, space, key)


def _mode(module: nn.Module, root: nn.Module, known: list[bool]) -> bool:
    """Return whether a module was in training mode when the root last was; `known` stores the answer."""
    known[0] = module.training if root.training else known[0]
    return known[0]


def _marks(module: nn.Module, names: Set[str]) -> tuple[Any, ...]:
    """Return the user's attributes on a module's tensors that code names, as (tensor, attribute, value)."""
    held = (*module._parameters.items(), *module._buffers.items())
    marks = [(key, own) for key, tensor in held if tensor is not None and (own := marks_of(tensor))]
    is_named = names.__contains__ if names.isdisjoint(_BY_ANY_NAME) else lambda name: True
    return tuple((key, name, value) for key, own in marks for name, value in own.items() if is_named(name))
