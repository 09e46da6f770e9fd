"""Calls of torch.set_grad_enabled in user code that no context manager undoes.

torch.set_grad_enabled(False)            unpaired: +1
with torch.no_grad(): …                  +1 on entry, -1 on exit
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.overrides import TorchFunctionMode


class GradSwitches(TorchFunctionMode):
    """Mode in which `unpaired` counts the switches of grad mode that no context has undone."""

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
    """Return 1 for a switch that has to be undone, -1 for one that undoes one, by the method of torch that calls it.

    `with set_grad_enabled(False):` switches in __init__, __enter__ and __exit__; as a decorator, in __init__ and
    __call__.
    """
    opens = 1
    while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
        method, context = frame.f_code.co_name, frame.f_locals.get("self")
        again = method == "__enter__" and isinstance(context, torch.set_grad_enabled)
        opens = -1 if method in ("__exit__", "__call__") else 0 if again else 1
        frame = frame.f_back
    return opens
