"""Numbers that forwards change, and of which shapes did not tell: named in the step in which they first change.

    if self.go: self.calls += 1                            a flag that the loop sets later
    self.amax = max(self.amax, float(x.abs().max()))       what shapes on the meta device cannot run

Those attributes are looked at, once before and once behind a step, that code of blocks sets outside of `__init__`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..objects.user_code import methods_of, steps_in
from .microbatch_state import changed_line, replicas_line

_logger = logging.getLogger("quintsched.runtime")


class LateState:
    """The numbers that code of some blocks sets, by what they are called in messages.

    Args:
        blocks: by their numbers.

    Attributes:
        places: their names, and where they are; known: what is named already.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.known: list[str] = []
        self.places = [
            (f"block {number} ({type(block).__name__}){path and f'.{path}'}.{key}", module.__dict__, key)
            for number, block in blocks.items()
            for path, module in block.named_modules()
            for key in sorted(_set_by(type(module)))
        ]
        self._before: list[Any] = []

    def begin(self) -> None:
        """Note what they are before a step."""
        self._before = self._now()

    def tell(self, microbatches: int, replicas: int) -> None:
        """Write a line on those that a step has changed and nobody has named: they are not looked at any more."""
        if (now := self._now()) == self._before:
            return
        changed = [place for place, was, is_now in zip(self.places, self._before, now, strict=True) if was != is_now]
        self.places = [place for place in self.places if place not in changed]
        names = [name for name, *_ in changed if name not in self.known]
        for line in filter(None, (changed_line(names, microbatches), replicas_line(names, replicas))):
            _logger.warning("%s", line)

    def _now(self) -> list[Any]:
        found = (own.get(key) for _, own, key in self.places)
        return [value if isinstance(value, (int, float)) else None for value in found]


def _set_by(kind: type) -> set[str]:
    """Return the attributes that code of a user's class sets, other than when it is made."""
    codes = (function.__code__ for function in methods_of(kind) if function.__name__ != "__init__")
    return {step.argval for code in codes for step in steps_in(code) if step.opname == "STORE_ATTR"}
