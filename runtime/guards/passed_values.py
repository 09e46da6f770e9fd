"""Marks that detect values passed on through objects: a block reads a value that a block of another stage has set.

    layer 0    ctx.h0 = h          stage 0's     ┐ a mark in its place tells whether it is read
    layer 3    h + ctx.h0          stage 1's own ┘

Using a mark ends the block's run, whatever the code does with it.
"""

from __future__ import annotations

from typing import Any

from ..objects.host_values import OPERATORS
from ..objects.snapshot import Snapshot


class MarkRead(BaseException):
    """Raised when a block uses a mark; a BaseException, so that the block's `except Exception` does not catch it."""


class ReadMark:
    """Placeholder for a value that block `setter`, of another stage, has set."""

    def __init__(self, setter: int) -> None:
        self.setter, self.is_read = setter, False

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in Snapshot({"": (args, tuple((kwargs or {}).values()))}, numbers=False).values():
            if isinstance(value, ReadMark):
                value.is_read = True
        raise MarkRead


def _read(self: ReadMark, *_: Any) -> Any:
    object.__setattr__(self, "is_read", True)
    raise MarkRead


for _operator in OPERATORS:
    setattr(ReadMark, f"__{_operator}__", _read)
