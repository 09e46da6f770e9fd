"""What stands on a rank at its fullest: activations, and received messages that nobody has taken yet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quintsched.columns import Columns, Ints
from quintsched.costs import Costs
from quintsched.dataflow import Kind
from quintsched.events import first_maker
from quintsched.instructions import Recv
from quintsched.plan import Plan


def peak_activations(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of `activation` costs, in microbatches of a whole rank at unit costs.

    An activation is held from its forward to the end of its backward.
    """
    columns, flows, chunks = plan.columns, plan.flows, plan.schedule.chunks
    held = np.array([costs.of_chunk("activation", stage, chunks) for stage in range(len(plan.stage_to_pp))])

    def change(rows: Ints, keys: Ints) -> npt.NDArray[np.float64]:
        saved = flows.of_kind(keys, Kind.SAVED)
        stages = keys[saved] // flows.num_numbers % flows.num_stages
        return np.bincount(rows[saved], weights=held[stages], minlength=len(columns)).astype(np.float64)

    made = change(flows.produces.rows, flows.produces.keys)
    taken = change(flows.consumes.rows, flows.consumes.keys)
    return tuple(peak / chunks for peak in _peaks(columns, made, taken))


def peak_receives(plan: Plan) -> tuple[int, ...]:
    """Return the most messages that each pp rank has received, in program order, and not yet taken."""
    columns, flows = plan.columns, plan.flows
    received = columns.are(Recv)
    makers = first_maker(flows.produces, columns.rank, columns.rank[flows.consumes.rows], flows.consumes.keys)
    of_message = (makers >= 0) & received[makers]
    taken = np.bincount(flows.consumes.rows[of_message], minlength=len(columns))
    return tuple(int(peak) for peak in _peaks(columns, received.astype(float), taken.astype(float)))


def _peaks(columns: Columns, made: npt.NDArray[np.float64], taken: npt.NDArray[np.float64]) -> list[float]:
    """Return each rank's peak of what is made in a row and taken after it."""
    peaks = []
    for rank in range(len(columns.first) - 1):
        rows = columns.rows_of(rank)
        here = slice(rows.start, rows.stop)
        standing = np.cumsum(made[here]) - np.cumsum(np.r_[0.0, taken[here]])[:-1]
        peaks.append(float(standing.max(initial=0.0)))
    return peaks
