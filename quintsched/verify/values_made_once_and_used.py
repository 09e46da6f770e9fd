"""Point 2, data flow: every value is produced once, before its uses on the rank, and consumed; none is left over.

All values of all ranks are checked at once, in arrays that give, per place, the row that produces and the row that
consumes its value; each fault found is then described.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quintsched.ir.diagnostics import Finding, Point
from quintsched.ir.instruction_columns import ABSENT
from quintsched.ir.instruction_values import AMBIENT
from quintsched.ir.plan_data import PlanData


def broken_flow(plan: PlanData) -> Iterator[Finding]:
    """Yield every fault of the data flow of a well-formed plan, in the order of ranks and instructions."""
    life = _Lives(plan)
    faults = [*life.made_twice(), *life.missing(), *life.left_over()]
    for _, finding in sorted(faults, key=lambda fault: fault[0]):
        yield finding


class _Lives:
    """First producer and first consumer of the value at each place; `ABSENT` if there is none."""

    def __init__(self, plan: PlanData) -> None:
        self._plan, self._flows = plan, plan.flows
        self._making = plan.flows.first_makers
        self._taking = plan.flows.first_takers

    def made_twice(self) -> Iterator[tuple[int, Finding]]:
        """Yield the second and later productions of a value."""
        made = self._flows.produces
        first = self._making[made.places]
        for i in np.flatnonzero(made.rows != first).tolist():
            words = f"makes {self._words(made.places[i])} a second time; see instruction {self._index(first[i])}"
            yield self._fault(made.rows[i], words)

    def missing(self) -> Iterator[tuple[int, Finding]]:
        """Yield uses of values that are never produced, are produced only later, or have already been consumed."""
        for uses in (self._flows.consumes, self._flows.reads, self._flows.follows):
            made, taken = self._making[uses.places], self._taking[uses.places]
            late = (made == ABSENT) | (made >= uses.rows) | ((taken != ABSENT) & (taken < uses.rows))
            for i in np.flatnonzero(late).tolist():
                if made[i] == ABSENT:
                    why = "which nothing on its rank makes"
                elif made[i] >= uses.rows[i]:
                    why = f"made only later, by {self._plan.at(int(made[i]))}"
                else:
                    why = f"which {self._plan.at(int(taken[i]))} has already taken"
                yield self._fault(uses.rows[i], f"needs {self._words(uses.places[i])}, {why}")

    def left_over(self) -> Iterator[tuple[int, Finding]]:
        """Yield values that are produced and never consumed."""
        made, numbering = self._flows.produces, self._flows.numbering
        left = self._taking[made.places] == ABSENT
        for kind in AMBIENT:
            left &= ~numbering.of_kind(made.places, kind)
        for i in np.flatnonzero(left).tolist():
            row = made.rows[i]
            rank = self._plan.columns.place(int(row))[0]
            yield self._fault(row, f"makes {self._words(made.places[i])}, and nothing on rank {rank} takes it")

    def _fault(self, row: int, words: str) -> tuple[int, Finding]:
        return int(row), Finding(
            Point.DATA_FLOW, f"{self._plan.at(int(row))} {words}", *self._plan.columns.place(int(row))
        )

    def _words(self, place: int) -> str:
        return str(self._flows.value_at(int(place)))

    def _index(self, row: int) -> int:
        return self._plan.columns.place(int(row))[1]
