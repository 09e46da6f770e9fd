"""Kinds: grouping of equal blocks, so that one proof covers all of them.

    80 layers of a model ─▶ one kind     classes, code, settings, buffers, shapes of weights, cuts: compared by value
    layer_idx = 0 … 79   ─▶ places       one kind if all call the same functions on the meta device

Modules, functions with closures and defaults, containers, arrays and objects with attributes are compared by content.
All else is compared by identity. In library modules, float attributes other than 0 and 1 (rates, scales) are ignored.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...user_objects.host_value_equality import bytes_of, state_of
from ...user_objects.library_or_user import is_of_framework, is_of_library, is_ours
from ...user_objects.object_contents import ClosureCells, attributes_of
from ..mesh_independent_dropout import KeyedDropout
from ..tensor.cut_rules import Choice
from ..tensor.cuttable_layers import Cut, has_hooked_weights
from .candidate_cuts import renumbered
from .twin_test_bench import BlockKind

_COUNTERS = ("idx", "index", "layer", "layer_id", "layer_number", "number", "i", "block_id")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice, CodeType)
_SEQUENCES = (tuple, list, deque)
_OBSERVERS = tuple(
    f"quintsched.runtime.{room}." for room in ("examine", "guards", "losses", "user_objects", "splitting")
)
"""Observers that this package attaches to modules' attributes; only their code is compared."""
_MODELS = "quintsched.runtime.models."
"""Models of this package, whose options are compared by content; its other objects are compared by identity."""

_MOST = 100_000
"""Number of entries of a block that are compared by content; further objects are compared by identity."""

Content = tuple[object, ...]
"""Contents of a block by value; hashable, and comparable."""


def kind_of(block: nn.Module, cuts: Sequence[Cut], path: str) -> tuple[Content, tuple[int, ...]]:
    """Return the key that equal blocks with equal cuts share, and a block's place numbers; `path` is its name."""
    cut_as = sorted(f"{cut.path.removeprefix(path)}:{cut.split.value}:{cut.parts}:{cut.is_paired}" for cut in cuts)
    content, places = content_of(block)
    return (*cut_as, *content), places


def content_of(block: nn.Module) -> tuple[Content, tuple[int, ...]]:
    """Return the contents of a block, and the ints in it that are its place in the model by their name (layer_idx)."""
    walk = _ObjectRecorder()
    walk.enter(block)
    return tuple(walk.found), tuple(walk.places)


def kinds_apart(kind: BlockKind, called: Mapping[int, object], cuts: Sequence[Sequence[Cut]]) -> dict[int, BlockKind]:
    """Split off the blocks of a kind that call other functions than its first, and return a new kind for each.

    `called` has the calls of each block by number; None: unknown. `cuts` are those of all blocks of the model.
    Raises `MisfitError` if such a block cannot be copied.
    """
    found: dict[int, BlockKind] = {}
    blocks, kind.blocks = dict(zip(called, kind.blocks, strict=True)), []
    for number, block in blocks.items():
        if number == kind.number or (called[number] is not None and called[number] == called[kind.number]):
            kind.blocks.append(block)
            continue
        try:
            blueprint = kind.blueprint.renewed(block)
        except Exception as error:
            raise MisfitError(
                f"{kind.name} and block {number} may do other things by their places in the model, and the latter "
                f"cannot be copied: {error}; let copy.deepcopy copy it"
            ) from error
        found[number] = BlockKind(number, blueprint, cuts[number], choice_for(kind.choice, number), [block])
        found[number].hooked = {renumbered(path, number): rule for path, rule in kind.hooked.items()}
        found[number].is_parted = kind.is_parted
    return found


def choice_for(choice: Choice, number: int) -> Choice:
    """Return a kind's choice with names for block `number`."""
    rules = {renumbered(path, number): rule for path, rule in choice.rules.items()}
    return replace(choice, rules=rules, proved=frozenset(renumbered(path, number) for path in choice.proved))


class _ByIdentity:
    """Key that compares an object by identity."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


class _ObjectRecorder:
    """Recorder of all objects in a block, in a fixed order."""

    def __init__(self) -> None:
        self.found: list[object] = []
        self.places: list[int] = []
        self._known: dict[int, tuple[int, object]] = {}

    def enter(self, thing: Any) -> None:
        """Record an object: its class, and its contents."""
        note = self.found.append
        if isinstance(thing, _PLAIN):
            return note((type(thing), repr(thing) if isinstance(thing, float | complex | range | slice) else thing))
        if id(thing) in self._known:
            return note(f"no. {self._known[id(thing)][0]}")
        self._known[id(thing)] = len(self._known), thing  # held, so that no other gets its id
        if len(self.found) > _MOST or isinstance(thing, type | ModuleType):
            return note(_ByIdentity(thing))
        self._enter_class(type(thing))
        if isinstance(thing, nn.Module):
            return self._enter_module(thing)
        if is_ours(type(thing)) and not type(thing).__module__.startswith(_MODELS):
            return note(type(thing) if hasattr(type(thing), "has_what_block_has") else _ByIdentity(thing))
        if str(getattr(thing, "__module__", "")).startswith(_OBSERVERS):
            return note(getattr(thing, "__code__", None))
        if isinstance(thing, Tensor | np.ndarray | array | bytearray | memoryview):
            return note(_digest(thing))
        if isinstance(thing, FunctionType):
            parts = (
                thing.__code__,
                *ClosureCells(thing).read_values().values(),
                thing.__defaults__,
                thing.__kwdefaults__,
                vars(thing),
            )
            note(_ByIdentity(thing.__globals__))
            return self._enter_all(parts)
        if isinstance(thing, MethodType):
            return self._enter_all((thing.__func__, thing.__self__))
        if isinstance(thing, partial):
            return self._enter_all((thing.func, thing.args, thing.keywords, vars(thing)))
        return self._enter_object(thing)

    def _enter_class(self, kind: type) -> None:
        """Record a class by identity; one made per block, which cannot be imported by its name, by its contents."""
        home: Any = sys.modules.get(kind.__module__)
        for name in kind.__qualname__.split("."):
            home = getattr(home, name, None)
        if home is kind or is_of_framework(kind) or id(kind) in self._known:
            return self.found.append(_ByIdentity(kind))
        self._known[id(kind)] = len(self._known), kind
        self.found.append(kind.__qualname__)
        for base in kind.__bases__:
            self._enter_class(base)
        for key, value in vars(kind).items():
            if key not in ("__dict__", "__weakref__"):
                held = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                self.found.append(key)
                if type(held) is int and _is_place(key):
                    self.places.append(held)
                else:
                    self.enter(held)
        return None

    def _enter_object(self, thing: Any) -> None:
        own = attributes_of(thing)
        if isinstance(thing, torch.Generator):
            pass
        elif isinstance(thing, set | frozenset):
            plain = all(isinstance(entry, _PLAIN) for entry in thing)
            self.found.append(frozenset((type(entry), entry) for entry in thing) if plain else _ByIdentity(thing))
        elif isinstance(thing, Mapping):
            self._enter_all((*thing.keys(), *thing.values()))
        elif isinstance(thing, _SEQUENCES):
            self._enter_all(thing)
        elif (state := state_of(thing)) is not None:
            self.found.append(state())
        elif not own:
            self.found.append(_ByIdentity(thing))
        for key, value in own.items():
            self.found.append(key)
            self.enter(value)

    def _enter_all(self, things: Any) -> None:
        self.found.append(len(things))
        for thing in things:
            self.enter(thing)

    def _enter_module(self, module: nn.Module) -> None:
        # the site of a keyed dropout differs in each block, and is no setting
        own = KeyedDropout.__annotations__ if isinstance(module, KeyedDropout) else ()
        is_of_torch, is_foreign = is_of_framework(type(module)), is_of_library(type(module))
        self.found.append(has_hooked_weights(module))
        for key, value in vars(module).items():
            if key in own:
                continue
            self.found.append(key)
            if type(value) is int and _is_place(key):
                self.places.append(value)
            elif isinstance(value, float) and is_foreign:
                self.found.append(value if value in (0.0, 1.0) else float)
            elif key.endswith("_hooks") and isinstance(value, Mapping):
                self._enter_all(list(value.values()))  # their keys are counted over all modules
            elif "_hooks_" in key:
                self.found.append(len(value))
            elif key == "_buffers" and is_of_torch:  # such as running statistics: by shape, as weights
                self.found += [(name, *_outline(buffer)) for name, buffer in value.items() if buffer is not None]
            elif key == "_parameters":
                for name, parameter in value.items():
                    self.found.append(name)
                    self.enter(parameter)
            else:
                self.enter(value)


def _is_place(key: str) -> bool:
    return key.strip("_") in _COUNTERS or key.endswith(("_idx", "_index", "layer_id"))


def _outline(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _digest(numbers: Any) -> object:
    """Return the outline of an array or tensor and a hash of its numbers; for weights and meta tensors, no hash."""
    if isinstance(numbers, Tensor):
        if type(numbers) is not Tensor or numbers.is_meta or not numbers.untyped_storage().nbytes():
            return _outline(numbers)
        flat = numbers.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
        return *_outline(numbers), hashlib.blake2b(flat.view(torch.uint8).numpy().data).hexdigest()
    if isinstance(numbers, np.ndarray):
        return str(numbers.dtype), numbers.shape, repr(numbers.tolist()) if numbers.dtype.hasobject else _sum(numbers)
    return str(getattr(numbers, "typecode", "")), _sum(numbers)


def _sum(numbers: Any) -> str:
    return hashlib.blake2b(bytes_of(numbers) if isinstance(numbers, np.ndarray) else bytes(numbers)).hexdigest()
