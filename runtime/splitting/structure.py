"""Where the layers of a model are: the lists of modules that hold most of its weights, or what a user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from quintsched.errors import UsageError, nearest

SMALLEST = 0.1
"""A list of modules with less than this share of the largest one's weights is no list of layers."""


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
    """Yield the outermost lists; a list of lists is so many lists."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, nn.ModuleList) and not all(isinstance(c, nn.ModuleList) for c in child):
            yield path, child
        else:
            yield from _lists(child, path)


def named_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the modules that patterns name, each once, in the order of the patterns.

    Raises `UsageError` for a pattern that is for no module, and for modules within each other.
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
