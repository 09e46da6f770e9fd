"""Search for references to layers and weights outside of the module tree, which a cut or deep copy would not update.

self.fc1                                    a submodule: copied, and cut in its place
self.tied = [self.fc1.weight]               refers to the whole weight, which is not trained once the layer is cut
self.run = lambda x: self.fc2(self.fc1(x))  a closure, which deep copies of the block share
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from quintsched.errors import MisfitError

from ....objects.library_or_user import PLAIN_TYPES, is_of_library
from ....objects.spaces import HOOKS, OF_TORCH, ClosureCells, attributes_of, defaults_of, parts_of

_MOST = 10_000
"""Maximum number of objects visited."""


def require_held_once(block: nn.Module, layers: Collection[nn.Module]) -> None:
    """Raise `MisfitError` if a block refers to `layers` that are cut, or to their weights, in other places too."""
    walk = _Walk(block, layers)
    if not layers:
        return
    for path, module in block.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in OF_TORCH}
        for key, value in (*own.items(), *((key, vars(module)[key]) for key in HOOKS)):
            if what := walk.find(value, is_shared=False):
                raise MisfitError(f"{f'{path}.{key}'.lstrip('.')!r} holds {what} beside its modules")


class _Walk:
    """Search through the attributes of modules, not descending into modules."""

    def __init__(self, block: nn.Module, layers: Collection[nn.Module]) -> None:
        self._modules = {id(module): path or "the block" for path, module in block.named_modules()}
        of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
        self._weights = {id(p): name for name, p in block.named_parameters() if id(p) in of_layers}
        self._layers = set(map(id, layers))
        self._seen: dict[tuple[int, bool], Any] = {}

    def find(self, thing: Any, *, is_shared: bool) -> str:
        """Return the name of a layer or weight that an object refers to, or ""; `is_shared`: deep copies share it."""
        key = id(thing), is_shared
        if isinstance(thing, PLAIN_TYPES) or key in self._seen or len(self._seen) > _MOST:
            return ""
        self._seen[key] = thing
        if isinstance(thing, nn.Parameter):
            return self._weights.get(id(thing), "")
        if isinstance(thing, nn.Module):
            is_found = id(thing) in self._layers or (is_shared and id(thing) in self._modules)
            return self._modules.get(id(thing), "") if is_found else ""
        is_shared = is_shared or isinstance(thing, FunctionType)
        return next(filter(None, (self.find(part, is_shared=is_shared) for part in _parts(thing))), "")


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, FunctionType):
        return (
            ()
            if is_of_library(thing)
            else (*ClosureCells(thing).read_values().values(), *defaults_of(thing), vars(thing))
        )
    if isinstance(thing, MethodType) and isinstance(thing.__self__, nn.Module):
        return ()
    if isinstance(thing, tuple | MethodType | partial):
        return (part for _, part in parts_of(thing) or ())
    if isinstance(thing, dict):
        return dict.values(thing)
    if isinstance(thing, list | set | frozenset):
        return thing
    return () if isinstance(thing, type) or is_of_library(type(thing)) else attributes_of(thing).values()
