"""State of one pipeline rank in a symbolic run: its position in the program, and its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quintsched.ir.instruction_values import Value, ValueKind
from quintsched.verify.algebraic_training_model import Gradient


@dataclass
class SymbolicRank:
    """State of one pipeline rank; `shares` lists the contributions to each stage's gradient, in order."""

    number: int
    index: int = 0
    values: dict[Value, Any] = field(default_factory=dict)
    grads: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    shares: dict[int, list[tuple[int, Gradient]]] = field(default_factory=dict)
    reduced: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    applied: dict[tuple[int, int], list[Gradient]] = field(default_factory=dict)

    def take_value(self, kind: ValueKind, stage: int, unit: int) -> Any:
        """Consume a value; raises `Fault` if it is not on this rank."""
        value = Value(kind, stage, unit)
        self.look_at(value)
        return self.values.pop(value)

    def look_at(self, value: Value) -> Any:
        """Return a value; raises `Fault` if it is not on this rank."""
        if value not in self.values:
            raise Fault(f"needs {value}, which is not on rank {self.number}")
        return self.values[value]

    def put(self, kind: ValueKind, stage: int, unit: int, number: Any) -> None:
        """Produce a value; raises `Fault` if it is already on this rank."""
        value = Value(kind, stage, unit)
        if value in self.values:
            raise Fault(f"makes {value}, which is already on rank {self.number}")
        self.values[value] = number


class Fault(Exception):
    """Raised if an instruction cannot be executed."""


class Stopped(NamedTuple):
    """Early end of a run: the faults, and the (rank, index) of the instructions concerned."""

    faults: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
