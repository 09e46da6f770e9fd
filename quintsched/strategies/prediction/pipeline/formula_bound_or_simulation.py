"""Pipeline times of n strategies: from the times of ranks per microbatch to the end of a step's last computation.

times of ranks ──▶ closed form                    if the schedule has one, and a rank's stages are alike
              └──▶ lower bound                    otherwise, while many strategies are compared
times of stages ──▶ simulation, shape by shape    otherwise, on request
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.prediction.layers_of_ranks import BIDIRECTIONAL, V_SHAPED, Kinds, RankTimes
from quintsched.strategies.prediction.operators import Array
from quintsched.strategies.prediction.pipeline.closed_forms import CLOSED_FORMS, one_f_one_b
from quintsched.strategies.prediction.pipeline.runs_of_equal_ranks import Passes, Pipelines, RowNumbers
from quintsched.strategies.prediction.pipeline.simulated_makespans import (
    bound_of,
    exposed_reductions,
    has_closed_form,
    reduction_bound,
    staged,
)
from quintsched.strategies.prediction.strategy_columns import Table, distinct


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Times of each stage of n strategies, (n, S) each, in seconds."""

    each: RankTimes
    """Times per microbatch."""
    reduction: Array
    """Time of its gradient reduction."""
    gathering: Array
    """Time of gathering its weights after the optimizer step."""
    stepping: Array
    """Time of the optimizer step."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Pipeline times of a step, (n,) each."""

    makespan: Array
    """End of the last computation; a lower bound if not `exact`."""
    exposed: Array
    """Time of gradient reduction beyond it, if that overlaps with backwards."""
    exact: NDArray[np.bool_]


DECIDES = tuple(field.name for field in fields(Table) if field.name not in ("zero", "values"))
"""Columns on which a makespan depends, beside ZeRO's exchanges in each microbatch."""


def spans(
    table: Table,
    each: RankTimes,
    ends: RankTimes,
    kinds: Kinds,
    reduction: Array,
    of_stages: Callable[[RowNumbers], StageTimes] | None,
    *,
    tied: bool,
    least: Array,
) -> Spans:
    """Return the pipeline times of each strategy.

    Args:
        table: the strategies.
        each: times of ranks of each kind, (n, K).
        ends: times of the embedding and of the head, (n, 2): the extra work of the first and the last stage.
        kinds: the kinds of ranks.
        reduction: time of gradient reduction by kind of rank, (n, K); `exposed` is for rows that overlap it.
        of_stages: returns the stage times of rows without closed form, which are then simulated; None: bounds suffice.
        tied: whether the first and the last stage share weights.
        least: time of reduction of the stage that a rank reduces last, (n, K).
    """
    weights = each.weights + each.expert_weights
    pace = np.where(weights > 0, reduction / np.maximum(weights, 1.0), 0.0).max(axis=1)
    first, which = distinct([getattr(table, name) for name in DECIDES] + [table.zero * (table.zero >= 2)])
    makespan, exact = _makespans(table, each, ends, kinds, first)
    found = Spans(makespan[which], np.zeros(len(table)), exact[which])
    for code, schedule in enumerate(table.values["schedule"]):
        rows = np.flatnonzero((table.schedule == code) & (table.overlap > 0))
        if len(rows):
            of_ends = (ends.weights.T * pace)[:, rows]
            s = _pipelines(schedule, table, each, ends, kinds, rows)
            exposed = exposed_reductions(schedule, s, reduction.T[:, rows], *of_ends, tied=tied)
            bound = reduction_bound(s, found.makespan[rows], least.T[:, rows], of_ends)
            found.exposed[rows] = np.where(found.exact[rows], exposed, bound * kinds.alike[rows, 0])
    if of_stages is not None:
        _simulate(table, np.flatnonzero(~found.exact), found, of_stages, tied=tied)
    return found


def _makespans(
    table: Table, each: RankTimes, ends: RankTimes, kinds: Kinds, of: RowNumbers
) -> tuple[Array, NDArray[np.bool_]]:
    """Return the makespan of these rows, (n,), and whether it is exact (no lower bound)."""
    makespan, exact = np.zeros(len(of)), np.zeros(len(of), bool)
    for code, schedule in enumerate(table.values["schedule"]):
        at = np.flatnonzero(table.schedule[of] == code)
        if not len(at):
            continue
        rows = of[at]
        s, alike = _pipelines(schedule, table, each, ends, kinds, rows), kinds.alike[rows, 0] > 0
        closed = alike & has_closed_form(schedule, table.microbatches[rows], table.pp[rows])
        closed |= table.pp[rows] * table.chunks[rows] == 1
        if closed.any():
            makespan[at] = CLOSED_FORMS.get(schedule, one_f_one_b)(s)
        if not closed.all():
            makespan[at] = np.where(closed, makespan[at], bound_of(schedule, s, alike))
        exact[at] = closed
    return makespan, exact


def _simulate(
    table: Table, rows: RowNumbers, found: Spans, of_stages: Callable[[RowNumbers], StageTimes], *, tied: bool
) -> None:
    """Simulate rows, all of one shape at once."""
    shapes = np.stack([table.schedule, table.pp, table.microbatches, table.chunks])[:, rows]
    distinct, which = np.unique(shapes, axis=1, return_inverse=True)
    for number, (code, pp, microbatches, chunks) in enumerate(distinct.T.tolist()):
        members = rows[which.reshape(-1) == number]
        times, schedule = of_stages(members), table.values["schedule"][code]
        forward, *halves = (one.T for one in times.each.passes)
        durations = np.stack([forward, *halves, sum(halves)])
        if schedule in BIDIRECTIONAL:  # the other half of the stages are twins of the same pieces
            durations, reduction = np.concatenate([durations] * 2, axis=1), np.concatenate([times.reduction.T] * 2)
        else:
            reduction = times.reduction.T
        ends = (0, len(reduction) - 1) if tied and schedule not in BIDIRECTIONAL else ()
        makespan, exposed = staged(schedule, pp, microbatches, chunks, durations, reduction, ends)
        found.makespan[members], found.exposed[members], found.exact[members] = makespan, exposed, True


def _pipelines(
    schedule: str, table: Table, each: RankTimes, ends: RankTimes, kinds: Kinds, rows: RowNumbers
) -> Pipelines:
    """Return the pipelines of rows of one schedule."""
    ranks, of_ends = kinds.ranks.T[:, rows], ends.passes
    f, i, w = (one.T[:, rows] for one in each.passes)
    return Pipelines(
        f,
        i,
        w,
        ranks=ranks,
        p=ranks.sum(axis=0),
        m=table.microbatches[rows].astype(np.float64),
        v=table.chunks[rows].astype(np.float64),
        first=Passes(*(one[rows, 0] for one in of_ends)),
        last=Passes(*(one[rows, 1] for one in of_ends)),
        bent=schedule in V_SHAPED,
    )
