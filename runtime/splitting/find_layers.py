"""Layers of a model: the lists of modules that hold most of its weights, or modules that the user names.

Also ties: each block gets a copy of a weight that several blocks share, and the engine keeps the copies equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from types import MethodType
from typing import Any

from torch import nn

from quintsched.errors import UsageError, nearest

SMALLEST = 0.1
"""Share of the largest list's weights below which a list of modules is no list of layers."""


def find_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers of a model: the entries of its outermost lists of modules.

    Raises `UsageError` where it has none.
    """
    lists = list(_lists(model, ""))
    sizes = [sum(p.numel() for p in found.parameters()) for _, found in lists]
    largest = max(sizes, default=0)
    names = [
        f"{name}.{key}"
        for (name, found), size in zip(lists, sizes, strict=True)
        if largest and size >= SMALLEST * largest
        for key in found._modules
    ]
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no list of layers (nn.ModuleList) by which it can be split; name its blocks: "
            'split(model, blocks=["embed", "layers.*", "head"])'
        )
    return names


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost lists; of a list of lists, the inner ones."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, nn.ModuleList) and not all(isinstance(c, nn.ModuleList) for c in child):
            yield path, child
        else:
            yield from _lists(child, path)


def named_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the modules that patterns match, each once, in the order of the patterns.

    Raises `UsageError` for a pattern without a match, and for modules within each other.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, str] = {}
    for pattern in patterns:
        depth = pattern.count(".")
        here = [name for name in names if name.count(".") == depth and fnmatchcase(name, pattern)]
        if not here:
            raise UsageError(f"blocks: {pattern!r} is no module of {type(model).__name__}{nearest(pattern, names)}")
        for name in here:
            found.setdefault(name, pattern)
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise UsageError(f"blocks: {name!r} is a part of {outer!r}, which is a block as well")
    return list(found)


def untie(blocks: Sequence[nn.Module]) -> dict[str, tuple[str, ...]]:
    """Give each block its own copy of shared weights; return ties: name → "<block>.<name in the block>" of each copy.

    The modules of the model stay as they are: where a weight is replaced, the modules around it are copied.
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
    """Return the blocks, with a shallow copy in place of each repeated one."""
    found = {id(block): number for number, block in reversed(list(enumerate(blocks)))}
    return [block if found[id(block)] == k else shallow_copy(block) for k, block in enumerate(blocks)]


def in_words(blocks: Iterable[object]) -> str:
    """Return the classes of blocks in order, each once for a run: "Prologue, 12 x GPT2Block, Epilogue"."""
    names = (type(block).__name__ if isinstance(block, nn.Module) else "a builder" for block in blocks)
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in runs)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return another module of the same class and parts; parametrized modules refuse `copy.copy`."""
    made: nn.Module = object.__new__(type(module))
    object.__setattr__(made, "__dict__", dict(vars(module)))
    return made


def _fresh(weight: str, taken: Collection[str]) -> str:
    """Return a name for a tie, from its first weight; blocks may have different weights of one name."""
    name = "_".join(weight.split(".")[-3:])
    return next(n for n in (name, *(f"{name}_{k}" for k in range(2, len(taken) + 3))) if n not in taken)


def _give_copy(block: nn.Module, name: str) -> None:
    """Replace a weight in a block by a copy wherever it occurs, in copies of the modules around it."""
    weight = block.get_parameter(name)
    before = vars(block)
    object.__setattr__(block, "__dict__", dict(before))  # a layer's block shares the layer's
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
    """Rebind methods that a module stores in itself (`self.act = self._gelu`) to its copy."""
    for key, method in before.items():
        if isinstance(method, MethodType) and getattr(method.__self__, "__dict__", None) is before:
            copied.__dict__[key] = MethodType(method.__func__, copied)
