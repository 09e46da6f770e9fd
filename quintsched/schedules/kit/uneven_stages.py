"""Uneven stages: a user's placement under which each stage of the schedule stands for a run of the plan's stages.

    own, a V             0   1     1 0         the schedule yields, on rank 0   F0      F3  B3  B0
    user's               0 0 1 1 1 0           runs  [0 1] [2] [3 4] [5]
                                               which becomes                    F0 F1   F5  B5  B1 B0

    own, a loop          0 1 2 3 0 1 2 3
    user's               0 1 2 3 0 1 2         runs  [0] [1] [2] [3] [4] [5] [6] []

A computation of a schedule's stage becomes those of all stages of its run: forwards in order, backwards and their
halves in reverse, overlaps in pairs. A stage with an empty run is left out. No new dependencies arise, so an order that
could run still can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from quintsched.errors import UnsoundError
from quintsched.ir.instruction_columns import Columns, Flags, Ints, woven
from quintsched.ir.instruction_set import Bwd, Fwd, Overlap, Recompute
from quintsched.ir.ragged import Ragged
from quintsched.schedules.kit.registry import Schedule, Shape
from quintsched.simulation.cost_forms import PerStage
from quintsched.simulation.costs import Costs


@dataclass(frozen=True)
class StageRuns:
    """Map from a schedule's stages to runs of the plan's stages; `own` is the schedule's own placement."""

    own: tuple[int, ...]
    stages: tuple[range, ...]

    def asked(self, shape: Shape) -> Shape:
        """Return the shape that the schedule is called with, for a plan of the given shape."""
        every = shape.recompute
        recompute = tuple(max((every[s] for s in run), default=0) for run in self.stages) if every else ()
        chosen = shape.recompute_microbatches
        some = tuple(tuple(sorted({m for s in run for m in chosen[s]})) for run in self.stages) if chosen else ()
        return replace(shape, stage_to_pp=self.own, recompute=recompute, recompute_microbatches=some)

    def merge(self, costs: Costs) -> Costs:
        """Return the costs with per-stage lists of the plan merged to one value per stage of the schedule."""

        def per_run(name: str, value: PerStage) -> PerStage:
            if not isinstance(value, tuple):
                return value
            if name == "message":  # output of the run's last stage; an empty run forwards the one before it
                return tuple(value[max(run.stop - 1, 0)] for run in self.stages)
            together = max if name == "experts" else sum
            return tuple(together([0.0, *(value[stage] for stage in run)]) for run in self.stages)

        return costs.with_stages(per_run)

    @cached_property
    def _both_ways(self) -> Ragged:
        """Runs in order, followed by all runs reversed."""
        return Ragged.from_lists([*self.stages, *(run[::-1] for run in self.stages)])

    def expand(self, order: Columns, shape: Shape, where: str) -> Columns:
        """Return one rank's order with the schedule's stages expanded to the plan's stages.

        Raises an `UnsoundError` that begins with `where` for a stage that the schedule does not have.
        """
        each, origin = order.apart
        unknown = np.flatnonzero((each.stage < 0) | (each.stage >= len(self.own)))
        if len(unknown):
            index = int(origin[unknown[0]])
            found = order.instruction(index)
            raise UnsoundError(f"{where}: instruction {index}, {found}: it has the stages 0 to {len(self.own) - 1}")
        in_reverse = ~each.are(Fwd, Recompute)
        rows, stages = self._both_ways.expand(each.stage + in_reverse * len(self.own))
        units = each.unit[rows]
        stays = ~each.are(Recompute)[rows] | (units < 0) | (units >= shape.num_units)
        stays[~stays] = shape.recomputing[stages[~stays], units[~stays]]
        kept = np.flatnonzero(stays)
        taken = each.take_rows(rows[kept], np.array([0, len(kept)]))
        alone = replace(taken, columns={**taken.columns, "stage": stages[kept]})
        return _side_by_side(alone, origin[rows[kept]], order.are(Overlap))


def _side_by_side(alone: Columns, origin: Ints, overlap: Flags) -> Columns:
    """Return one rank's rows with the sides of each expanded `Overlap` paired, as far as both go; the rest follow.

    forwards 0 1 2 beside backwards 5 4  ─▶  Overlap(0, 5) Overlap(1, 4) Fwd 2

    `origin` gives the schedule's instruction of each row, `overlap` marks those that are an `Overlap`.
    """
    sides = np.flatnonzero(overlap[origin])
    if not len(sides):
        return alone
    backward = alone.are(Bwd)[sides]
    _, first, run = np.unique(2 * origin[sides] + backward, return_index=True, return_inverse=True)
    name = origin[sides] * len(alone) + np.arange(len(sides)) - first[run]  # id of an Overlap, and a place in its runs
    _, ahead, behind = np.intersect1d(name[~backward], name[backward], assume_unique=True, return_indices=True)
    forwards, backwards = sides[~backward][ahead], sides[backward][behind]
    fields = {
        field: list(zip(alone.stage[rows].tolist(), alone.unit[rows].tolist(), strict=True))
        for field, rows in (("forward", forwards), ("backward", backwards))
    }
    pairs = Columns.make(Overlap, np.zeros(len(forwards), np.int64), 1, **fields)
    stays = np.ones(len(alone), np.bool_)
    stays[backwards] = False
    place = np.cumsum(stays) - 1
    rest = np.setdiff1d(np.flatnonzero(stays), forwards)
    first_rows = np.array([0, int(stays.sum())])
    return woven(first_rows, (place[rest], alone.take_rows(rest, np.array([0, len(rest)]))), (place[forwards], pairs))


def find_runs(schedule: Schedule, own: tuple[int, ...], wanted: tuple[int, ...]) -> StageRuns | None:
    """Return how a placement expands the schedule's `own`; None if the schedule is to be called with it unchanged.

    That is so if it does not expand it, if each rank holds as many stages as in its own, and for schedules that run
    with any placement or give routes of their own.
    """
    if schedule.any_placement or schedule.routes or wanted == own or Counter(own) == Counter(wanted):
        return None
    ways = 2 if schedule.bidirectional else 1
    half, rest = divmod(len(wanted), ways)
    if rest:
        return None
    size = len(own) // ways
    found = [_follow(own[k * size :][:size], wanted[k * half :][:half]) for k in range(ways)]
    lengths = found[0]
    if lengths is None or any(others is None or others != lengths for others in found):
        return None
    starts = np.cumsum([0, *lengths * ways]).tolist()
    runs = tuple(range(start, end) for start, end in pairwise(starts))
    missing = {rank for rank, run in zip(own, runs, strict=True) if not run}
    some_keep_all, all_keep_some = missing < {*own}, {*wanted} == {*own}
    if missing and (ways > 1 or not some_keep_all or not all_keep_some):
        return None
    return StageRuns(own, runs)


def _follow(own: Sequence[int], wanted: Sequence[int]) -> list[int] | None:
    """Return the number of wanted stages for each own stage, as even as possible; None if they do not match."""
    lengths, at = [0] * len(own), 0
    for rank, group in groupby(wanted):
        while at < len(own) and own[at] != rank:
            at += 1
        end = at
        while end < len(own) and own[end] == rank:
            end += 1
        length = len(list(group))
        number = min(end - at, length)
        if not number:
            return None
        ends = [length * k // number for k in range(number + 1)]
        lengths[at : at + number] = [b - a for a, b in pairwise(ends)]
        at = end
    return lengths
