"""Rows of `fidelity.py` and `offload.py`: simulated and measured steps, and the delays that nothing explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

from quintsched.instructions import Compute
from quintsched.ir.dataflow_analysis import Value, flow
from quintsched.simulation.simulator import Simulation
from quintsched.trace.measured_trace import MeasuredStep

AnyRow = TypeVar("AnyRow")


class Slip(NamedTuple):
    """Delay of a computation that its predecessors do not explain."""

    late_ms: float
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.late_ms:.2f} ms later than explained"


@dataclass(frozen=True)
class Row:
    """Result of one schedule: simulated and measured step time, and its largest delays.

    `nominal_ms` is the time simulated with what sleeping blocks were asked for, where `simulated_ms` is with what they
    take.
    """

    schedule: str
    simulated_ms: float
    measured_ms: float
    limit: float
    slips: Sequence[Slip] = ()
    nominal_ms: float | None = None
    columns: ClassVar[str] = f"{'simulated':>12}{'measured':>12}{'ratio':>9}{'nominal':>12}"

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.simulated_ms

    @property
    def is_within(self) -> bool:
        return abs(self.ratio - 1) <= self.limit

    def __str__(self) -> str:
        figures = f"  {self.schedule:<18}{self.simulated_ms:12.2f}{self.measured_ms:12.2f}{self.ratio:9.3f}"
        figures += f"{self.nominal_ms:12.2f}" if self.nominal_ms else ""
        return figures if self.is_within else "\n      ".join([figures + "  MISSED", *map(str, self.slips)])


def find_slips(simulation: Simulation, measured: MeasuredStep, most: int = 3) -> list[Slip]:
    """Return the computations with the largest unexplained delays, in milliseconds.

    Predecessors are the computation before it on its rank, and those that produce its inputs.
    """
    plan = simulation.plan
    pairs = [
        (wanted, real, rank, index)
        for rank, rows in enumerate(zip(simulation.timeline, measured.timeline, strict=True))
        for index, (wanted, real) in enumerate(zip(*rows, strict=True))
        if isinstance(wanted.instruction, Compute)
    ]
    late_ranks: dict[int, float] = {}
    late_values: dict[Value, float] = {}
    slips: list[Slip] = []
    for wanted, real, rank, index in sorted(pairs, key=lambda pair: pair[0].start):
        taken_and_made = flow(wanted.instruction, plan.layout, rank)
        before = [late_ranks.get(rank, 0.0), *(late_values.get(value, 0.0) for value in taken_and_made.consumes)]
        later = real.start + real.wait - wanted.start - max(before)
        slips.append(Slip(later, f"rank {rank}, {index} {wanted.instruction}"))
        late_ranks[rank] = real.end - wanted.end
        late_values |= dict.fromkeys(taken_and_made.produces, late_ranks[rank])
    return sorted(slips, reverse=True)[:most]


def report(title: str, rows: Iterator[AnyRow], columns: str = Row.columns) -> list[AnyRow]:
    """Print rows as they come."""
    print(f"\n{title}\n  {'':<18}{columns}", flush=True)
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(row)
    return found
