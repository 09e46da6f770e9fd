"""All-gather weights that replicas shard (ZeRO-3) before their use, and free them after.

    GatherParams(0)  Fwd(0, 0)  GatherParams(1)  Fwd(0, 1)  FreeParams(0)  Fwd(1, 0) …
    └─ first use ──▶            └─ one computation ahead ──────────────────▶

Consecutive computations of a stage share one gathering. The next stage's weights are gathered during the last of them
(prefetch), so that they arrive in time, and the full weights of at most two stages are resident (of twice as many where
forwards and backwards overlap).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quintsched.ir.instruction_columns import Columns, Ints
from quintsched.ir.instruction_set import COMPUTING, NEEDS_WEIGHTS, FreeParams, GatherParams
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs


def gather_params(plan: PlanData) -> PlanData:
    """Add `GatherParams` before, and `FreeParams` after, each run of uses of a stage's weights, if sharded."""
    if not plan.zero.shards_weights:
        return plan
    columns, computations = plan.columns, plan.columns.rows_where(*COMPUTING)
    stage, first, last = _stretches(plan)
    ahead = computations[np.maximum(np.searchsorted(computations, first) - 1, 0)]
    ahead = np.where(columns.rank[ahead] == columns.rank[first], ahead, first)
    gathers = Columns.make(GatherParams, columns.rank[first], columns.num_ranks, stage=stage)
    frees = Columns.make(FreeParams, columns.rank[last], columns.num_ranks, stage=stage)
    return replace(plan, programs=Programs(columns.insert(np.r_[last + 1, ahead], frees, gathers)))


def _stretches(plan: PlanData) -> tuple[Ints, Ints, Ints]:
    """Return (stages, first rows, last rows) of maximal runs of computations that all use the stage's weights."""
    apart, origin = plan.columns.apart
    uses = apart.rows_where(*NEEDS_WEIGHTS)
    stage, row = apart.stage[uses], origin[uses]
    number = np.cumsum(np.r_[0, np.diff(row) > 0][: len(uses)])  # index among the computations that use weights
    order = np.lexsort((number, stage))
    stage, row, number = stage[order], row[order], number[order]
    begins = np.r_[True, (np.diff(stage) != 0) | (np.diff(number) > 1)][: len(uses)]
    ends = np.r_[begins[1:], True][: len(uses)]
    in_order = np.argsort(row[begins], kind="stable")
    return stage[begins][in_order], row[begins][in_order], row[ends][in_order]
