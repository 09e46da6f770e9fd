"""Recomputation: rerun the forwards whose activations were dropped, just before the backward that needs them.

    … Bwd(s, 3)  Recompute(s, 4)  Bwd(s, 4) …

There the activations are resident for the shortest time. Only the backward needs the gradient of the stage's output, so
the rank recomputes while that is still in flight. `Recompute`s placed by the schedule stay where they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quintsched.ir.instruction_columns import Columns
from quintsched.ir.instruction_set import BEGINS_BACKWARD, Recompute
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs


def place_recomputes(plan: PlanData) -> PlanData:
    """Add the `Recompute`s that the order of computation leaves out; none if no stage is recomputed."""
    if not any(plan.recompute):
        return plan
    (columns, origin), units = plan.columns.apart, plan.schedule.num_units
    rows = columns.rows_where(*BEGINS_BACKWARD)
    rows = rows[plan.layout.recomputing[columns.stage[rows], columns.unit[rows]]]
    placed = columns.rows_where(Recompute)
    cells = columns.stage * units + columns.unit
    rows = rows[~np.isin(cells[rows], cells[placed])]
    stage, unit, rank = columns.stage[rows], columns.unit[rows], columns.rank[rows]
    again = Columns.make(Recompute, rank, columns.num_ranks, stage=stage, microbatch=unit)
    return replace(plan, programs=Programs(plan.columns.insert(origin[rows], again)))
