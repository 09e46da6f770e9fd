"""What blocks count or average in every forward, beside their weights: told of where replicas divide the forwards.

    self.calls += 1     self.average.lerp_(x.mean(0), 0.1)     u, v of a spectral norm

One process has it after all forwards of a step, each of several replicas after its own, so that they are not alike.
Tables that are made at the first call and kept are no such state, and neither are the statistics of norms and the loads
of experts, which replicas put together.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..parallel.expert.moe import MoE

_logger = logging.getLogger("quintsched.runtime")
_OWN = frozenset(nn.Module().__dict__)
"""The attributes of every module."""


class MovingState:
    """Watches the forwards of a block in one step.

    Args:
        number: of the block.
        buffers: whether buffers are looked at as well as attributes.
    """

    def __init__(self, number: str, block: nn.Module, *, buffers: bool) -> None:
        self._number, self._block, self._buffers = number, block, buffers
        self._before: dict[str, object] = {}
        self._changes: Counter[str] = Counter()

    def watch(self) -> list[Any]:
        """Begin to watch; returns the handles of the hooks."""
        return [
            self._block.register_forward_pre_hook(lambda *_: self._begin()),
            self._block.register_forward_hook(lambda *_: self._end()),
        ]

    def tell(self, replicas: int) -> None:
        """Write a warning of the first thing that more than one forward has changed."""
        for name, times in self._changes.items():
            if times > 1:
                _logger.warning(
                    "block %s (%s) changes %r in every forward, and each of %d replicas runs its own: it is not what "
                    "one process has after all of them, nor what depends on it",
                    *(self._number, type(self._block).__name__, name, replicas),
                )
                return

    def _begin(self) -> None:
        self._before = dict(self._found())

    def _end(self) -> None:
        for name, value in self._found():
            before = self._before.get(name, value)
            if before != value:
                counts = isinstance(value, (int, float)) and not isinstance(value, bool)
                self._changes[name] += 2 if counts and isinstance(before, (int, float)) else 1

    def _found(self) -> Iterator[tuple[str, object]]:
        """Yield what there is by its name, with what tells whether it has changed."""
        for path, module in self._block.named_modules():
            for key, value in module.__dict__.items():
                if key not in _OWN and (token := _token(value)) is not None:
                    yield f"{path}.{key}".lstrip("."), token
            if self._buffers and not isinstance(module, (_NormBase, MoE)):
                for key, buffer in module.named_buffers(recurse=False):
                    yield f"{path}.{key}".lstrip("."), _token(buffer)


def _token(value: object) -> object:
    if isinstance(value, Tensor):
        return "tensor", value.data_ptr(), value._version
    if isinstance(value, (int, float)):
        return value
    return len(value) if isinstance(value, (list, dict, set, deque)) else None
