"""Draws of a block that is proved: whole and cut alike, and the training's generators stay as they are.

Without dropout few blocks draw at all. Each function that does is run with torch's generators seeded by its number in
the run, and these are restored behind it; ranks that are threads share them, so nobody else draws meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...blocks.blocks import seeded
from ..draws.names import DRAWS
from .twins import SEED


@contextmanager
def undisturbed(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """A context for one run of a block, which records gradients; by other seeds it draws other numbers."""
    with torch.enable_grad(), _OwnDraws(device, seed):
        yield


class _OwnDraws(TorchFunctionMode):
    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._device, self._seed, self._count = device, seed, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in DRAWS or (kwargs or {}).get("generator") is not None:
            return func(*args, **(kwargs or {}))
        self._count += 1
        with seeded(self._seed, self._count, self._device):
            return func(*args, **(kwargs or {}))
