"""Point 2, the data flow: whatever is needed was made before on its rank, made once, and nothing is left over.

All values of all ranks are looked at together, as sorted numbers; each fault that this finds is then put in words.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quintsched.ir.columns import Ints
from quintsched.ir.values import AMBIENT, Kind
from quintsched.plan import Plan
from quintsched.verify.diagnostics import Finding, Point


def broken_flow(plan: Plan) -> Iterator[Finding]:
    """Yield every fault of the data flow of a well-formed plan, in the order of ranks and instructions."""
    life = _Lives(plan)
    faults = [*life.made_twice(), *life.missing(), *life.left_over()]
    for _, finding in sorted(faults, key=lambda fault: fault[0]):
        yield finding


class _Lives:
    """Where each value of each rank is made and taken; a value's identity is rank x span + key."""

    def __init__(self, plan: Plan) -> None:
        flows, rank = plan.flows, plan.columns.rank
        self._plan = plan
        self._span = len(Kind) * flows.num_stages * flows.num_numbers
        self._made = rank[flows.produces.rows] * self._span + flows.produces.keys
        self._taken = rank[flows.consumes.rows] * self._span + flows.consumes.keys
        self._read = rank[flows.reads.rows] * self._span + flows.reads.keys
        self._followed = rank[flows.follows.rows] * self._span + flows.follows.keys
        self._makers, self._making = self._first(self._made, flows.produces.rows)
        self._takers, self._taking = self._first(self._taken, flows.consumes.rows)

    @staticmethod
    def _first(identities: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """Return the identities, sorted, and the first row of each."""
        found, first = np.unique(identities, return_index=True)
        return found, rows[first]

    @staticmethod
    def _look_up(known: Ints, rows: Ints, wanted: Ints) -> Ints:
        """Return the row of each wanted identity, -1 where it is not known."""
        if not len(known):
            return np.full(len(wanted), -1)
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.where(known[at] == wanted, rows[at], -1)

    def made_twice(self) -> Iterator[tuple[int, Finding]]:
        """Yield the second and later makings of a value."""
        rows = self._plan.flows.produces.rows
        first = self._look_up(self._makers, self._making, self._made)
        for i in np.flatnonzero(rows != first).tolist():
            words = f"makes {self._words(self._made[i])} a second time; see instruction {self._index(first[i])}"
            yield self._fault(rows[i], words)

    def missing(self) -> Iterator[tuple[int, Finding]]:
        """Yield uses of values that were never made, are made only later, or have been taken already."""
        flows = self._plan.flows
        rows = np.concatenate([flows.consumes.rows, flows.reads.rows, flows.follows.rows])
        wanted = np.concatenate([self._taken, self._read, self._followed])
        made = self._look_up(self._makers, self._making, wanted)
        taken = self._look_up(self._takers, self._taking, wanted)
        for i in np.flatnonzero((made < 0) | (made >= rows) | ((taken >= 0) & (taken < rows))).tolist():
            if made[i] < 0:
                why = "which nothing on its rank makes"
            elif made[i] >= rows[i]:
                why = f"made only later, by {self._plan.at(int(made[i]))}"
            else:
                why = f"which {self._plan.at(int(taken[i]))} has already taken"
            yield self._fault(rows[i], f"needs {self._words(wanted[i])}, {why}")

    def left_over(self) -> Iterator[tuple[int, Finding]]:
        """Yield what is made and never taken."""
        flows = self._plan.flows
        taken = self._look_up(self._takers, self._taking, self._made)
        ambient = flows.of_kind(flows.produces.keys, *AMBIENT)
        for i in np.flatnonzero((taken < 0) & ~ambient).tolist():
            row = flows.produces.rows[i]
            rank = self._plan.columns.place(int(row))[0]
            yield self._fault(row, f"makes {self._words(self._made[i])}, and nothing on rank {rank} takes it")

    def _fault(self, row: int, words: str) -> tuple[int, Finding]:
        return int(row), Finding(
            Point.DATA_FLOW, f"{self._plan.at(int(row))} {words}", *self._plan.columns.place(int(row))
        )

    def _words(self, identity: int) -> str:
        return str(self._plan.flows.value(int(identity) % self._span))

    def _index(self, row: int) -> int:
        return self._plan.columns.place(int(row))[1]
