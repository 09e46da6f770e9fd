"""Public class of spelled-out collectives: `CollectiveProgram` with methods for proof, timing and files.

plan = spell("all_reduce", "ring", 4)        plan.check().raise_if_unsound()        plan.save("ring.json")
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from quintsched.collectives import collective_json, collective_timing
from quintsched.collectives.collective_program import CollectiveProgram
from quintsched.collectives.collective_proof import CollectiveVerdict, prove
from quintsched.collectives.collective_timing import CollectiveRun
from quintsched.collectives.expand_collective import spelled
from quintsched.ir.collective_means_and_wire import Wire


@dataclass(frozen=True, eq=False)
class CollectivePlan(CollectiveProgram):
    """Spelled-out collective with its methods; see `CollectiveProgram` for its fields."""

    @classmethod
    def from_program(cls, program: CollectiveProgram) -> CollectivePlan:
        """Return the plan with these programs."""
        return cls(**{field.name: getattr(program, field.name) for field in fields(program)})

    def check(self) -> CollectiveVerdict:
        """Prove it free of deadlock, and every rank's result right; the verdict is cached."""
        return self._verdict

    @cached_property
    def _verdict(self) -> CollectiveVerdict:
        return prove(self)

    def simulate(self, num_bytes: float, wire: Wire) -> CollectiveRun:
        """Simulate its timing for `num_bytes` of data; raises `UnsoundError` if it is not sound."""
        return collective_timing.simulate(self, num_bytes, wire)

    def save(self, path: Path) -> None:
        """Write it to a file of its own; raises `UsageError` on failure."""
        collective_json.save(self, path)

    @classmethod
    def load(cls, path: Path) -> CollectivePlan:
        """Read a file; raises `UsageError` for a missing one, `InputError` for a broken one."""
        return cls.from_program(collective_json.load(path))


def spell(kind: str, algorithm: str, size: int, chunks: int | None = None, nodes: int = 1) -> CollectivePlan:
    """Return the mini-plan of a collective over `size` ranks.

    `chunks` is a multiple of `size` for rings (default: `size`), an even number for a tree (default: 8, over two ranks
    2). `nodes` is the number of nodes of a two-level collective, with consecutive ranks on each. Raises `UsageError`
    for an unknown kind or algorithm, and for a combination that is impossible.
    """
    return CollectivePlan.from_program(spelled(kind, algorithm, size, chunks, nodes))
