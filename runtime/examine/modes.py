"""Modes of torch that a user's code runs under: gradients on or off, inference, autocast of each kind of device.

with torch.no_grad():            Modes.now() there differs from Modes.now() around it
    t = self.teacher(x)          with modes.entered(): …   the same operations under the same modes, elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..comm.device import device_kinds


@dataclass(frozen=True)
class Modes:
    """The modes that are in force at some place of code.

    Attributes:
        grad: whether autograd records.
        inference: whether tensors are made for inference alone.
        autocast: kinds of devices, and to what operations there cast; None: they do not.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]

    @classmethod
    def now(cls) -> Modes:
        """Return those in force here."""
        kinds = device_kinds()
        casts = tuple((k, torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None) for k in kinds)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which these are in force, whatever is around it."""
        around = Modes.now()
        with ExitStack() as stack:
            if self.inference != around.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            for kind, dtype in self.autocast:
                if (kind, dtype) not in around.autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            if torch.is_grad_enabled() != self.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


def recordable(tree: Any) -> Any:
    """Return a tree in which tensors that were made for inference are copies that autograd can record."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf, tree)
