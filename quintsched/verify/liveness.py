"""Point 2, the data flow: whatever is needed was made before on its rank, made once, and nothing is left over.

All values of all ranks are looked at together, in tables that say of each place which row makes its value and which
row takes it; each fault that this finds is then put in words.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quintsched.ir.columns import ABSENT
from quintsched.ir.diagnostics import Finding, Point
from quintsched.ir.plan_data import PlanData
from quintsched.ir.values import AMBIENT


def broken_flow(plan: PlanData) -> Iterator[Finding]:
    """Yield every fault of the data flow of a well-formed plan, in the order of ranks and instructions."""
    life = _Lives(plan)
    faults = [*life.made_twice(), *life.missing(), *life.left_over()]
    for _, finding in sorted(faults, key=lambda fault: fault[0]):
        yield finding


class _Lives:
    """The first row that makes, and the first that takes, the value at each place; `ABSENT` where none does."""

    def __init__(self, plan: PlanData) -> None:
        self._plan, self._flows = plan, plan.flows
        self._making = plan.flows.first_makers
        self._taking = plan.flows.first_takers

    def made_twice(self) -> Iterator[tuple[int, Finding]]:
        """Yield the second and later makings of a value."""
        made = self._flows.produces
        first = self._making[made.places]
        for i in np.flatnonzero(made.rows != first).tolist():
            words = f"makes {self._words(made.places[i])} a second time; see instruction {self._index(first[i])}"
            yield self._fault(made.rows[i], words)

    def missing(self) -> Iterator[tuple[int, Finding]]:
        """Yield uses of values that were never made, are made only later, or have been taken already."""
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
        """Yield what is made and never taken."""
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
