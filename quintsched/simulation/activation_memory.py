"""What stands on a rank at its fullest: activations, and received messages that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quintsched.ir.columns import ABSENT, Amounts, Columns
from quintsched.ir.dataflow import Flows
from quintsched.ir.instructions import Recv
from quintsched.ir.plan_data import PlanData
from quintsched.ir.values import Kind
from quintsched.simulation.costs import Costs

HELD = {
    Kind.CHECKPOINT: "activation_checkpointed",
    Kind.SAVED: "activation",
    Kind.FETCHED: "activation",
    Kind.PENDING: "activation_after_input",
}
"""The values that count as activations, and which of the costs says how much each holds."""

HELD_BY_HOST = {Kind.OFFLOADED: "activation"}
"""Those that are in the host's memory."""


def peak_activations(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of `activation` costs, in microbatches of a whole rank at unit costs."""
    parts = plan.schedule.parts
    return tuple(peak / parts for peak in _peaks(plan.columns, activation_changes(plan, costs)))


def peak_host(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of activations in its host's memory, likewise."""
    parts = plan.schedule.parts
    return tuple(peak / parts for peak in _peaks(plan.columns, _changes(plan, costs, HELD_BY_HOST)))


def activation_changes(plan: PlanData, costs: Costs) -> Amounts:
    """Return by how much each row changes what its rank holds of activations, times the plan's chunks and slices.

    An activation is held from its forward to the end of its backward; between the halves of a backward, what
    `activation_after_input` says is left of it, and between a forward and its recomputation, what
    `activation_checkpointed` says; in the host's memory it is not held. The keys and values of a microbatch count
    with its first slice.
    """
    spec, stages = plan.schedule, range(len(plan.stage_to_pp))
    change = _changes(plan, costs, HELD)
    if spec.slices > 1:
        keys = [costs.of_stage("keys", stage, spec.chunks, spec.slices) for stage in stages]
        _add(change, plan.flows, Kind.KEYS, keys, every=spec.slices)
    return change


def _changes(plan: PlanData, costs: Costs, held: Mapping[Kind, str]) -> Amounts:
    """Return by how much each row changes what there is of some values, times the plan's chunks and slices."""
    change = np.zeros(len(plan.columns))
    for kind, name in held.items():
        stages = range(len(plan.stage_to_pp))
        _add(change, plan.flows, kind, [costs.of_part(name, stage, plan.schedule.parts) for stage in stages])
    return change


def _add(change: Amounts, flows: Flows, kind: Kind, held: Sequence[float], every: int = 1) -> None:
    """Add to each row what the values of a kind hold that it makes, less those that it takes; of each `every`, one."""
    numbering = flows.numbering
    for uses, sign in ((flows.produces, 1.0), (flows.consumes, -1.0)):
        counts = np.flatnonzero(numbering.of_kind(uses.places, kind))
        if every > 1:
            counts = counts[numbering.numbers(uses.places[counts], kind) % every == 0]
        stages = numbering.stages(uses.places[counts], kind)
        np.add.at(change, uses.rows[counts], sign * np.array(held)[stages])


def peak_receives(plan: PlanData) -> tuple[int, ...]:
    """Return the most messages that each pp rank has received, in program order, and not yet taken."""
    columns, flows = plan.columns, plan.flows
    received = columns.are(Recv)
    makers = flows.first_makers[flows.consumes.places]
    of_message = (makers != ABSENT) & received[makers]
    change = received.astype(float)
    np.subtract.at(change, flows.consumes.rows[of_message], 1.0)
    return tuple(int(peak) for peak in _peaks(columns, change))


def _peaks(columns: Columns, change: Amounts) -> list[float]:
    """Return the peak on each rank of what `change` adds up to, row by row."""
    return [
        float(np.cumsum(change[rows.start : rows.stop]).max(initial=0.0))
        for rows in map(columns.rows_of, range(columns.num_ranks))
    ]
