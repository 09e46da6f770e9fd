"""Switches of gradients in users' code that no context switches back.

torch.set_grad_enabled(False)            unpaired: +1
with torch.no_grad(): …                  +1 where it is entered, -1 where it is left
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.overrides import TorchFunctionMode


class GradSwitches(TorchFunctionMode):
    """Within it, `unpaired` counts the switches of gradients that no context has switched back."""

    def __init__(self) -> None:
        super().__init__()
        self.unpaired = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            self.unpaired += _opens(_getframe(1))
        return func(*args, **(kwargs or {}))


def _opens(frame: Any) -> int:
    """Return 1 for a switch that has to be switched back, -1 for one that does so, by the method of torch that calls.

    `with set_grad_enabled(False):` switches when it is made, entered and left; as a decorator, when it is made and
    called.
    """
    opens = 1
    while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
        method, context = frame.f_code.co_name, frame.f_locals.get("self")
        again = method == "__enter__" and isinstance(context, torch.set_grad_enabled)
        opens = -1 if method in ("__exit__", "__call__") else 0 if again else 1
        frame = frame.f_back
    return opens
