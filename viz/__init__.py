"""Pictures of plans: `render` draws one simulated plan, `compare` stacks several on one time axis.

    from quintsched.viz import compare, render

    render(plan.simulate(), Path("plan.png"))

matplotlib is loaded when the first picture is asked for, not when this package is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timeline import compare, render

__all__ = ["compare", "render"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quintsched.viz' has no attribute {name!r}")
    return getattr(import_module(".timeline", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
