"""Classes of blocks that differ in their forwards alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def of_kind(base: type[nn.Module], forward: Callable[..., Any], **attributes: Any) -> type[nn.Module]:
    """Return a class like `base`, and of its name, with another forward, and attributes besides."""
    return type(base.__name__, (base,), {"forward": forward, **attributes})
