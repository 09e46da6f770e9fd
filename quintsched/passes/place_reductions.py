"""Gradient reduction over replicas as early as the data allows: right after the stage's last backward.

    … Bwd(s, 7)  SendGrad(s, 7)  AllReduceBucket(s, 0) …

If optimizer state is sharded over replicas (ZeRO), a `ReduceScatterBucket` takes its place; if gradients are sharded,
one follows after every few backwards, so that full gradients are never resident for longer:

    … Bwd(s, 0)  SendGrad(s, 0)  ReduceScatterBucket(s, 0, part 0)  … Bwd(s, 1)  ReduceScatterBucket(s, 0, part 1) …

If ep shards experts, a stage's last bucket holds the rank's own experts, and is summed over dp and cp alone.

Sends of gradients to earlier stages that follow at once go first: another rank waits for them. Gradients of tied
weights, and of twins, are summed at the end of the programs: so the gradients of stages that hold such weights are
reduced once, after that, and stay resident in full until then.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quintsched.ir.instruction_columns import ABSENT, Columns, Ints
from quintsched.ir.instruction_set import (
    ENDS_BACKWARD,
    AllReduceBucket,
    FreeParams,
    OnBucket,
    ReduceScatterBucket,
    SendGrad,
    SendSkipGrad,
    SyncTied,
)
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs


def reduce_buckets(plan: PlanData) -> PlanData:
    """Add a reduction of each stage's buckets over the axes of its replicas; nothing if there are no replicas."""
    buckets = plan.layout.reductions
    if not buckets:
        return plan
    columns = plan.columns
    stages, reductions, rows = _completions(plan)
    fields = {
        "stage": np.repeat(stages, len(buckets)),
        "bucket": np.tile([bucket for bucket, _ in buckets], len(rows)),
        "axes": [axes for _, axes in buckets] * len(rows),
    }
    kind: type[OnBucket] = AllReduceBucket
    if plan.zero.shards_optimizer:
        kind, fields["part"] = ReduceScatterBucket, np.repeat(reductions, len(buckets))
    made = Columns.make(kind, np.repeat(columns.rank[rows], len(buckets)), columns.num_ranks, **fields)
    before = np.repeat(_behind_sends(columns, rows), len(buckets))
    return replace(plan, programs=Programs(columns.insert(before, made)))


def _completions(plan: PlanData) -> tuple[Ints, Ints, Ints]:
    """Return (stages, reductions, rows): the row after which the gradients of each stage's reduction are complete.

    Sorted by row, then by stage and reduction.
    """
    layout, (columns, origin) = plan.layout, plan.columns.apart
    most = layout.most_reductions
    last = np.full(len(plan.stage_to_pp) * most, ABSENT)
    rows = columns.rows_where(*ENDS_BACKWARD)
    stage = columns.stage[rows]
    np.maximum.at(last, stage * most + layout.reduction_of[stage, columns.unit[rows]], origin[rows])
    columns = plan.columns
    for row in columns.rows_where(SyncTied).tolist():
        for held in columns.values("stages", np.array([row]))[0]:
            if layout.rank_of(held) == columns.rank[row]:
                last[held * most] = row
    found = np.flatnonzero(last != ABSENT)
    found = found[np.argsort(last[found], kind="stable")]
    return found // most, found % most, last[found]


def _behind_sends(columns: Columns, rows: Ints) -> Ints:
    """Return the first row after each of `rows`, on its rank, that is no send of gradients and no `FreeParams`."""
    stays = np.flatnonzero(~columns.are(SendGrad, SendSkipGrad, FreeParams))
    ends = columns.first[columns.rank[rows] + 1]
    following = np.r_[stays, len(columns)][np.searchsorted(stays, rows + 1)]
    found: Ints = np.minimum(following, ends)
    return found
