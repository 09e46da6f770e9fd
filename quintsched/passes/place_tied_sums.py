"""Sum the gradients of tied weights at the end of the programs, in one order on all ranks, which avoids deadlock.

… Bwd(s, 7)  SyncTied(embedding, stages 0+3)  AllReduceBucket(s, 0) …
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quintsched.ir.instruction_columns import Columns
from quintsched.ir.instruction_set import SyncTied
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs


def sync_tied(plan: PlanData) -> PlanData:
    """Add, at the end of every program, a `SyncTied` for each tie of its stages."""
    ties, layout = plan.layout.ties, plan.layout
    if not ties:
        return plan
    blocks = [
        Columns.make(
            SyncTied, np.array(layout.ranks_of(tie.stages)), layout.num_ranks, params=tie.params, stages=tie.stages
        )
        for tie in ties
    ]
    return replace(plan, programs=Programs(plan.columns.append(*blocks)))
