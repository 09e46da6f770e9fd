"""Move activations to the host's memory and back, so that no rank holds more of them than a cap.

    cap 2     F0  F1  OA0 F2  OA1 FA0 F3  B0  …
    to host       ├─0─┤   ├─1─┤                 a copy begins with the end of its forward; at OA its memory is free
    back                      ├─0─┤             it begins at FA, where memory is taken again; the backward waits

Where a computation needs memory that is not there, activations go whose backward is farthest (Belady 1966), those of
the computation just before only if nothing else is left: their copy would have nothing to run beside. Activations come
back one computation before their backward if there is room for both then, else right before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from quintsched.errors import UsageError
from quintsched.ir.columns import ABSENT, Columns, Ints, Programs
from quintsched.ir.instructions import BEGINS_BACKWARD, Compute, FetchAct, Fwd, OffloadAct
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.activation_memory import activation_changes, peak_activations
from quintsched.simulation.costs import Costs

Moves = list[tuple[int, int]]
"""(row, before): the computation that makes or takes activations, and the row before which their copy stands."""


def place_offloads(plan: PlanData, cap: float | None, costs: Costs | None = None) -> PlanData:
    """Add `OffloadAct`s and `FetchAct`s, so that no rank holds more activations than `cap`; None: adds none.

    The cap is in the costs' unit of memory, by default microbatches of a whole rank. Raises `UsageError` for one that
    is too small, with the least that works, and for a plan without backwards.
    """
    if cap is None:
        return plan
    if plan.mode != "train":
        raise UsageError(f"{plan.schedule.name}: offload: the plan only computes forward and keeps no activations")
    costs = costs or Costs()
    costs.check_stages(len(plan.stage_to_pp))
    changes = activation_changes(plan, costs)
    ranks = [_Rank(plan, costs, changes.tolist(), rank, cap) for rank in range(plan.columns.num_ranks)]
    if not all(rank.fits() for rank in ranks):
        least = least_cap(plan, costs)
        raise UsageError(
            f"{plan.schedule.name}: offload is {cap:g}, but what a rank computes with holds more, even where all else "
            f"is in its host's memory; the least that works: {least:g}"
        )
    moved = _with_copies(plan, [m for r in ranks for m in r.offloads], [m for r in ranks for m in r.fetches])
    return replace(moved, schedule=replace(plan.schedule, options={**plan.schedule.options, "offload": float(cap)}))


def least_cap(plan: PlanData, costs: Costs | None = None) -> float:
    """Return the least cap that works: the peak where all activations that can go to the host do so, at once."""
    columns = plan.columns
    forwards, backwards = columns.rows_where(Fwd), columns.rows_where(*BEGINS_BACKWARD)
    offloads = [(row, row + 1) for row in _keeping(plan, forwards).tolist()]
    fetches = [(row, row) for row in _keeping(plan, backwards).tolist()]
    return max(peak_activations(_with_copies(plan, offloads, fetches), costs or Costs()), default=0.0)


def _keeping(plan: PlanData, rows: Ints) -> Ints:
    """Return those rows whose stages keep their activations, which can then go to the host."""
    found: Ints = rows[~plan.layout.recomputing[plan.columns.stage[rows]]]
    return found


def _with_copies(plan: PlanData, offloads: Moves, fetches: Moves) -> PlanData:
    """Return the plan with these copies; before the same row, activations go before others come."""
    columns, blocks = plan.columns, []
    for kind, moves in ((OffloadAct, offloads), (FetchAct, fetches)):
        rows = np.array([row for row, _ in moves], np.int64)
        fields = {"stage": columns.stage[rows], "microbatch": columns.unit[rows]}
        blocks.append(Columns.make(kind, columns.rank[rows], columns.num_ranks, **fields))
    before = np.array([before for _, before in (*offloads, *fetches)], np.int64)
    return replace(plan, programs=Programs(columns.insert(before, *blocks))) if len(before) else plan


class _Rank:
    """A walk through one rank's computations that keeps what it holds under a cap.

    Activations are known by the row of their forward. `offloads` and `fetches` are the copies that it takes.
    """

    def __init__(self, plan: PlanData, costs: Costs, changes: Sequence[float], rank: int, cap: float) -> None:
        columns, parts = plan.columns, plan.schedule.parts
        own = columns.rows_of(rank)
        self._rows = columns.rows_where(Compute)
        self._rows = self._rows[(self._rows >= own.start) & (self._rows < own.stop)]
        self._changes, self._cap, self._held = changes, cap * parts, 0.0
        self._backward, self._forward = _ends(plan, self._rows)
        amounts = [costs.of_part("activation", stage, parts) for stage in range(len(plan.stage_to_pp))]
        self._amount = {forward: amounts[columns.stage[forward]] for forward in self._backward}
        self._resident: set[int] = set()
        self._away: set[int] = set()
        self.offloads: Moves = []
        self.fetches: Moves = []

    def fits(self) -> bool:
        """Walk to the end; return whether the cap can be kept."""
        newest, rows = ABSENT, self._rows.tolist()
        for row, following in pairwise([*rows, ABSENT]):
            own, coming = self._forward.get(row, ABSENT), self._forward.get(following, ABSENT)
            needed = max(self._changes[row], 0.0)
            if own in self._away and not self._fetch(own, row, 0.0, self._movable(own, newest, coming)):
                return False
            if coming in self._away:
                self._fetch(coming, row, needed, [other for other in self._movable(own) if other != newest])
            if not self._make_room(needed, row, self._movable(own, newest, coming)):
                return False
            self._held += self._changes[row]
            self._resident.discard(own)
            newest = row if row in self._backward else ABSENT
            if newest != ABSENT:
                self._resident.add(row)
        return True

    def _movable(self, own: int, *last: int) -> list[int]:
        """Return what may go to the host, those with the farthest backward first, but `last` at the end."""
        return sorted(self._resident - {own}, key=lambda row: (row in last, -self._backward[row]))

    def _fetch(self, forward: int, before: int, needed: float, movable: Sequence[int]) -> bool:
        """Bring activations back, if there is room for them and for what else is needed."""
        amount = self._amount[forward]
        if not self._make_room(amount + needed, before, movable):
            return False
        self._held += amount
        self._away.remove(forward)
        self.fetches.append((forward, before))
        return True

    def _make_room(self, needed: float, before: int, movable: Sequence[int]) -> bool:
        """Move activations to the host until there is room; return False, with nothing moved, where there cannot be."""
        held, gone = self._held, []
        for forward in movable:
            if held + needed <= self._cap:
                break
            if self._amount[forward]:
                held -= self._amount[forward]
                gone.append(forward)
        if held + needed > self._cap:
            return False
        self._held = held
        self._resident.difference_update(gone)
        self._away.update(gone)
        self.offloads += [(forward, before) for forward in gone]
        return True


def _ends(plan: PlanData, rows: Ints) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each forward among the rows whose activations are kept its backward, and the other way round."""
    columns = plan.columns
    kept = _keeping(plan, rows)
    cells = columns.stage * plan.schedule.num_units + columns.unit
    forwards, backwards = kept[columns.are(Fwd)[kept]], kept[columns.are(*BEGINS_BACKWARD)[kept]]
    backward_of = dict(zip(cells[backwards].tolist(), backwards.tolist(), strict=True))
    found = {row: backward_of[cell] for row, cell in zip(forwards.tolist(), cells[forwards].tolist(), strict=True)}
    return found, {backward: forward for forward, backward in found.items()}
