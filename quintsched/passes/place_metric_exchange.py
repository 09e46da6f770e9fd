"""End of the pipeline's work: exchange of loss, loss weight and metrics, then the gradient norm.

The exchange yields the batch's total loss weight, by which every rank divides its gradients: the norm comes after it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quintsched.ir.instruction_columns import Columns
from quintsched.ir.instruction_set import ClipGrad, ShareMetrics
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs


def share_metrics(plan: PlanData) -> PlanData:
    """End every program with `ShareMetrics`."""
    return _ended(plan, ShareMetrics)


def clip_gradients(plan: PlanData) -> PlanData:
    """End every program with `ClipGrad`."""
    return _ended(plan, ClipGrad)


def _ended(plan: PlanData, kind: type[ShareMetrics | ClipGrad]) -> PlanData:
    columns = plan.columns
    ends = Columns.make(kind, np.arange(columns.num_ranks), columns.num_ranks)
    return replace(plan, programs=Programs(columns.append(ends)))
