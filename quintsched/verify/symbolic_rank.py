"""One pipeline rank while a plan is run on numbers: where it stands, and which values stand there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quintsched.ir.values import Kind, Value
from quintsched.verify.algebra import Gradient


@dataclass
class SymbolicRank:
    """One pipeline rank while it runs; `shares` are what was added to each stage's gradient, in order."""

    number: int
    index: int = 0
    values: dict[Value, Any] = field(default_factory=dict)
    grads: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    shares: dict[int, list[tuple[int, Gradient]]] = field(default_factory=dict)
    reduced: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    applied: dict[tuple[int, int], list[Gradient]] = field(default_factory=dict)

    def take(self, kind: Kind, stage: int, unit: int) -> Any:
        """Take a value away; raises `Fault` where it does not stand here."""
        value = Value(kind, stage, unit)
        self.look_at(value)
        return self.values.pop(value)

    def look_at(self, value: Value) -> Any:
        """Return a value; raises `Fault` where it does not stand here."""
        if value not in self.values:
            raise Fault(f"needs {value}, which does not stand on rank {self.number}")
        return self.values[value]

    def put(self, kind: Kind, stage: int, unit: int, number: Any) -> None:
        """Make a value; raises `Fault` where it stands already."""
        value = Value(kind, stage, unit)
        if value in self.values:
            raise Fault(f"makes {value}, which stands on rank {self.number} already")
        self.values[value] = number


class Fault(Exception):
    """What an instruction cannot do."""


class Stopped(NamedTuple):
    """Where a run came to its end too early: why, and the (rank, index) of those that stand there."""

    faults: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
