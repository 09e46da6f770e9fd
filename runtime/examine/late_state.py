"""Numbers that forwards change, and of which shapes did not tell: named in the step in which they first change.

    if self.go: self.calls += 1                            a flag that the loop sets later
    self.amax = max(self.amax, float(x.abs().max()))       what shapes on the meta device cannot run

Those attributes, also of classes, and globals are looked at, once before and once behind a step, that methods of blocks
set outside of `__init__`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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
        found = (
            place
            for number, block in blocks.items()
            for path, module in block.named_modules()
            for place in _set_by(f"block {number} ({type(block).__name__}){path and f'.{path}'}", module)
        )
        self.places = list({place[0]: place for place in found}.values())
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


def _set_by(name: str, module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield what code of a module's class sets, other than when it is made: its attributes, its class's and globals."""
    kind = type(module)
    functions = [function for function in methods_of(kind) if function.__name__ != "__init__"]
    steps = [(step.opname, step.argval, function) for function in functions for step in steps_in(function.__code__)]
    for key in sorted({key for opname, key, _ in steps if opname == "STORE_ATTR"}):
        yield f"{name}.{key}", module.__dict__, key
        yield from ((f"{base.__name__}.{key}", vars(base), key) for base in kind.__mro__ if key in vars(base))
    yield from ((key, function.__globals__, key) for opname, key, function in steps if opname == "STORE_GLOBAL")
