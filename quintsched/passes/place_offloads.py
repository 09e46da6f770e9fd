"""Offload activations to host memory and fetch them back, so that no rank holds more of them than a cap.

    cap 2     F0  F1  OA0 F2  OA1 FA0 F3  B0  …
    to host       ├─0─┤   ├─1─┤                 the copy starts when its forward ends; at OA device memory is free
    back                      ├─0─┤             the copy starts at FA, which takes memory; the backward waits for it

If a computation lacks memory, the activations with the farthest backward are offloaded (Belady 1966); those of the
latest computation only if no others are left, as no computation would hide their copy. Activations are fetched one
computation before their backward if there is room for both then, else right before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quintsched.errors import UsageError
from quintsched.ir.instruction_columns import ABSENT, Columns
from quintsched.ir.instruction_set import BEGINS_BACKWARD, COMPUTING, FetchAct, Fwd, OffloadAct
from quintsched.ir.instruction_values import ValueKind
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulated_activation_memory import Changes, activation_changes, held_by, peak_activations

ROUNDING = 1e-9
"""Share of a cap by which sums of activations may be above it."""
Moves = list[tuple[int, int]]
"""(cell, before): cell = stage x units + unit, and the row before which the copy of its activations is inserted."""


def place_offloads(plan: PlanData, cap: float | None, costs: Costs | None = None) -> PlanData:
    """Add `OffloadAct`s and `FetchAct`s so that no rank holds more activations than `cap`; None adds none.

    The cap is in the costs' unit of memory, by default microbatches of a whole rank. Raises `UsageError` for a cap that
    is too small, with the least that works, and for a plan without backwards.
    """
    if cap is None:
        return plan
    costs = costs_of_kept(plan, costs, "offload")
    kept, changes = Offloadable.from_plan(plan, costs), activation_changes(plan, costs)
    ranks = [_OffloadWalk(plan, kept, changes, rank, cap) for rank in range(plan.columns.num_ranks)]
    if not all(rank.fits() for rank in ranks):
        least = least_cap(plan, costs)
        raise UsageError(
            f"{plan.schedule.name}: offload is {cap:.10g}, but what a rank computes with holds more, even where all "
            f"else is in its host's memory; the least that works: {least:.10g}"
        )
    moved = _with_copies(plan, [m for r in ranks for m in r.offloads], [m for r in ranks for m in r.fetches])
    return replace(moved, schedule=replace(plan.schedule, options={**plan.schedule.options, "offload": float(cap)}))


def costs_of_kept(plan: PlanData, costs: Costs | None, setting: str) -> Costs:
    """Return the costs of a plan's stages, unit costs by default; raises `UsageError` for a plan without backwards."""
    if plan.mode != "train":
        raise UsageError(f"{plan.schedule.name}: {setting}: the plan only computes forward and keeps no activations")
    costs = costs or Costs()
    costs.check_fits(plan.schedule, len(plan.stage_to_pp), plan.columns.num_ranks)
    return costs.spread(plan.stage_shares, plan.schedule.slices)


def least_cap(plan: PlanData, costs: Costs | None = None) -> float:
    """Return the least cap that works: the peak if all activations that can be offloaded are, as early as possible."""
    costs = (costs or Costs()).spread(plan.stage_shares, plan.schedule.slices)
    kept = Offloadable.from_plan(plan, costs)
    offloads = [(cell, forward + 1) for cell, forward in kept.forwards.items()]
    fetches = [(cell, kept.backwards[cell]) for cell in kept.forwards]
    return max(peak_activations(_with_copies(plan, offloads, fetches), costs), default=0.0)


def _with_copies(plan: PlanData, offloads: Moves, fetches: Moves) -> PlanData:
    """Return the plan with these copies; offloads before the same row come before fetches."""
    columns, units, blocks, places = plan.columns, plan.schedule.num_units, [], []
    for kind, moves in ((OffloadAct, offloads), (FetchAct, fetches)):
        cells, before = np.array(moves, np.int64).reshape(-1, 2).T
        rank = np.array(plan.stage_to_pp, np.int64)[cells // units]
        order = np.argsort(rank, kind="stable")
        fields = {"stage": cells[order] // units, "microbatch": cells[order] % units}
        blocks.append(Columns.make(kind, rank[order], columns.num_ranks, **fields))
        places.append(before[order])
    return replace(plan, programs=Programs(columns.insert(np.concatenate(places), *blocks))) if offloads else plan


class Offloadable(NamedTuple):
    """Activations that can be offloaded, by cell: the rows of their forward and backward, and their size."""

    forwards: dict[int, int]
    backwards: dict[int, int]
    amounts: dict[int, float]

    @classmethod
    def from_plan(cls, plan: PlanData, costs: Costs) -> Offloadable:
        """Find the activations that stay: neither recomputed, nor moved already."""
        apart, origin = plan.columns.apart
        units, found = plan.schedule.num_units, list[dict[int, int]]()
        for kinds in ((Fwd,), BEGINS_BACKWARD):
            rows = apart.rows_where(*kinds)
            stage, unit = apart.stage[rows], apart.unit[rows]
            rows = rows[~plan.layout.recomputing[stage, unit] & ~plan.layout.fetched[stage, unit]]
            cells = apart.stage[rows] * units + apart.unit[rows]
            found.append(dict(zip(cells.tolist(), origin[rows].tolist(), strict=True)))
        forwards, backwards = found
        cells = np.array(list(forwards), np.int64)
        amounts = held_by(plan, costs, ValueKind.SAVED, cells // units, cells % units)
        return cls(forwards, backwards, dict(zip(cells.tolist(), amounts.tolist(), strict=True)))


class _OffloadWalk:
    """Walk through one rank's computations that keeps its activations under a cap.

    `offloads` and `fetches` are the copies that this needs.
    """

    def __init__(self, plan: PlanData, kept: Offloadable, changes: Changes, rank: int, cap: float) -> None:
        own = plan.columns.rows_of(rank)
        rows = plan.columns.rows_where(*COMPUTING)
        self._rows: list[int] = rows[(rows >= own.start) & (rows < own.stop)].tolist()
        self._kept, self._changes = kept, changes
        self._makes = {row: cell for cell, row in kept.forwards.items() if row in own}
        self._takes = {row: cell for cell, row in kept.backwards.items() if row in own}
        self._cap, self._held = cap * plan.schedule.parts * (1 + ROUNDING), 0.0
        self._resident: set[int] = set()
        self._away: set[int] = set()
        self.offloads: Moves = []
        self.fetches: Moves = []

    def fits(self) -> bool:
        """Walk to the end; return whether the cap can be kept."""
        newest = ABSENT
        for row, following in pairwise([*self._rows, ABSENT]):
            own, coming = self._takes.get(row, ABSENT), self._takes.get(following, ABSENT)
            needed = float(self._changes.most[row])
            if own in self._away and not self._fetch(own, row, 0.0, self._movable(own, newest, coming)):
                return False
            if coming in self._away:
                self._fetch(coming, row, needed, [other for other in self._movable(own) if other != newest])
            if not self._make_room(needed, row, self._movable(own, newest, coming)):
                return False
            self._held += float(self._changes.net[row])
            self._resident.discard(own)
            newest = self._makes.get(row, ABSENT)
            if newest != ABSENT:
                self._resident.add(newest)
        return True

    def _movable(self, own: int, *last: int) -> list[int]:
        """Return the activations that may be offloaded, farthest backward first, but those of `last` at the end."""
        return sorted(self._resident - {own}, key=lambda cell: (cell in last, -self._kept.backwards[cell]))

    def _fetch(self, cell: int, before: int, needed: float, movable: Sequence[int]) -> bool:
        """Fetch activations back if there is room for them and for `needed` besides; return whether there is."""
        amount = self._kept.amounts[cell]
        if not self._make_room(amount + needed, before, movable):
            return False
        self._held += amount
        self._away.remove(cell)
        self.fetches.append((cell, before))
        return True

    def _make_room(self, needed: float, before: int, movable: Sequence[int]) -> bool:
        """Offload activations until there is room; return False, with nothing offloaded, if there cannot be."""
        held, gone = self._held, []
        for cell in movable:
            if held + needed <= self._cap:
                break
            if self._kept.amounts[cell]:
                held -= self._kept.amounts[cell]
                gone.append(cell)
        if held + needed > self._cap:
            return False
        self._held = held
        self._resident.difference_update(gone)
        self._away.update(gone)
        self.offloads += [(cell, before) for cell in gone]
        return True
