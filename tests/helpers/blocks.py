"""Classes of blocks of a few layers and a line of forward."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def of_kind(base: type[nn.Module], forward: Callable[..., Any], **attributes: Any) -> type[nn.Module]:
    """Return a class like `base`, and of its name, with another forward, and attributes besides."""
    return type(base.__name__, (base,), {"forward": forward, **attributes})


def of_layers(name: str, layers: Callable[[], Mapping[str, Any]], forward: Callable[..., Any]) -> type[nn.Module]:
    """Return a class of modules that have these layers, built anew for each module."""

    def build(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for attribute, layer in layers().items():
            setattr(self, attribute, layer)

    return type(name, (nn.Module,), {"__init__": build, "forward": forward})
