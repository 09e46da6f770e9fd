"""Gather weights that replicas shard (ZeRO-3) before they are used, and drop them after.

    GatherParams(0)  Fwd(0, 0)  GatherParams(1)  Fwd(0, 1)  FreeParams(0)  Fwd(1, 0) …
    └─ first use ──▶            └─ one computation ahead ──────────────────▶

Computations of a stage that follow each other share one gathering. The next stage's weights are gathered while the last
of these runs: so they are there in time, and the weights of at most two stages are resident.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quintsched.ir.columns import Columns, Programs
from quintsched.ir.instructions import NEEDS_WEIGHTS, Compute, FreeParams, GatherParams
from quintsched.ir.plan_data import PlanData


def gather_params(plan: PlanData) -> PlanData:
    """Add `GatherParams` before the weights of a stage are used and `FreeParams` after, where replicas hold shards."""
    if not plan.zero.shards_weights:
        return plan
    columns = plan.columns
    computations, uses = columns.rows_where(Compute), columns.rows_where(*NEEDS_WEIGHTS)
    stage, rank = columns.stage[uses], columns.rank[uses]
    changes = (np.diff(stage) != 0) | (np.diff(rank) != 0)
    first, last = np.r_[True, changes][: len(uses)], np.r_[changes, True][: len(uses)]
    ahead = computations[np.maximum(np.searchsorted(computations, uses[first]) - 1, 0)]
    ahead = np.where(columns.rank[ahead] == rank[first], ahead, uses[first])
    gathers = Columns.make(GatherParams, rank[first], columns.num_ranks, stage=stage[first])
    frees = Columns.make(FreeParams, rank[last], columns.num_ranks, stage=stage[last])
    return replace(plan, programs=Programs(columns.insert(np.r_[uses[last] + 1, ahead], frees, gathers)))
