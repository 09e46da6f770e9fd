"""Weights that several blocks of a model share: each block gets a copy, and the engine keeps the copies equal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import MethodType
from typing import Any

from torch import nn


def untie(blocks: Sequence[nn.Module]) -> dict[str, tuple[str, ...]]:
    """Give each block weights of its own; return what was one: name → "<block>.<name in the block>" of each copy.

    The modules of the model that the blocks are of stay as they are: those that get a copy are copied around it.
    """
    homes: dict[int, list[tuple[int, str]]] = {}
    for number, block in enumerate(blocks):
        first = {id(p): name for name, p in reversed(list(block.named_parameters(remove_duplicate=False)))}
        for weight, name in first.items():
            homes.setdefault(weight, []).append((number, name))
    tied: dict[str, tuple[str, ...]] = {}
    for places in homes.values():
        if len(places) < 2:
            continue
        tied[_fresh(places[0][1], tied)] = tuple(f"{number}.{name}" for number, name in places)
        for number, name in places[1:]:
            _give_copy(blocks[number], name)
    return tied


def apart(blocks: nn.Sequential) -> list[nn.Module]:
    """Return blocks with another module, of the same parts, for each that comes again."""
    found = {id(block): number for number, block in reversed(list(enumerate(blocks)))}
    return [block if found[id(block)] == k else shallow_copy(block) for k, block in enumerate(blocks)]


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return another module of the same class and parts; those that are parametrized refuse `copy.copy`."""
    made: nn.Module = object.__new__(type(module))
    object.__setattr__(made, "__dict__", dict(vars(module)))
    return made


def _fresh(weight: str, taken: Collection[str]) -> str:
    """Return a name for what is tied, by the first weight of it; blocks may have different weights of one name."""
    name = "_".join(weight.split(".")[-3:])
    return next(n for n in (name, *(f"{name}_{k}" for k in range(2, len(taken) + 3))) if n not in taken)


def _give_copy(block: nn.Module, name: str) -> None:
    """Let a block have a copy of a weight wherever it has it, in copies of the modules around it."""
    weight = block.get_parameter(name)
    before = vars(block)
    object.__setattr__(block, "__dict__", dict(before))  # a layer that is a block has the same one
    _bind_methods(block, before)
    own = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    for path, found in list(block.named_parameters(remove_duplicate=False)):
        if found is weight:
            *owners, key = path.split(".")
            owner = block
            for step in owners:
                owner = _own_child(owner, step)
            owner._parameters = {**owner._parameters, key: own}


def _own_child(module: nn.Module, key: str) -> nn.Module:
    its = module._modules[key]
    assert its is not None
    child = shallow_copy(its)
    _bind_methods(child, vars(its))
    child._modules, child._parameters = dict(child._modules), dict(child._parameters)
    module._modules = {**module._modules, key: child}
    return child


def _bind_methods(copied: nn.Module, before: dict[str, Any]) -> None:
    """Let methods that a module keeps of itself, `self.act = self._gelu`, be those of a copy."""
    for key, method in before.items():
        if isinstance(method, MethodType) and getattr(method.__self__, "__dict__", None) is before:
            copied.__dict__[key] = MethodType(method.__func__, copied)
