"""What stands on a rank at its fullest: activations, and received messages that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quintsched.ir.columns import ABSENT, Amounts, Columns, Ints
from quintsched.ir.instructions import Overlap, Recv
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
    return tuple(peak / parts for peak in _peaks(plan.columns, *activation_changes(plan, costs)))


def peak_host(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of activations in its host's memory, likewise."""
    net, _ = _changes(plan, costs, HELD_BY_HOST)
    return tuple(peak / plan.schedule.parts for peak in _peaks(plan.columns, net, np.maximum(net, 0.0)))


class Changes(NamedTuple):
    """By how much each row changes what its rank holds, and how much more than before it holds while it runs."""

    net: Amounts
    most: Amounts


def activation_changes(plan: PlanData, costs: Costs) -> Changes:
    """Return by how much each row changes what its rank holds of activations, times the plan's chunks and slices.

    An activation is held from its forward to the end of its backward; between the halves of a backward, what
    `activation_after_input` says is left of it, and between a forward and its recomputation, what
    `activation_checkpointed` says; in the host's memory it is not held. The keys and values of a microbatch count
    with its first slice. While an `Overlap` runs, what its forward makes is held beside what its backward takes.
    """
    change, made = _changes(plan, costs, (*HELD, Kind.KEYS) if plan.schedule.slices > 1 else HELD)
    return Changes(change, np.where(plan.columns.are(Overlap), made, np.maximum(change, 0.0)))


def _changes(plan: PlanData, costs: Costs, kinds: Iterable[Kind]) -> tuple[Amounts, Amounts]:
    """Return by how much each row changes what there is of values of some kinds, and how much of them it makes."""
    change, made = np.zeros((2, len(plan.columns)))
    for kind in kinds:
        _add(change, made, plan, costs, kind)
    return change, made


def _add(change: Amounts, made: Amounts, plan: PlanData, costs: Costs, kind: Kind) -> None:
    """Add to each row what the values of a kind hold that it makes, less those that it takes.

    What it makes is added to `made` as well.
    """
    numbering = plan.flows.numbering
    for uses, sign in ((plan.flows.produces, 1.0), (plan.flows.consumes, -1.0)):
        counts = np.flatnonzero(numbering.of_kind(uses.places, kind))
        places = uses.places[counts]
        held = held_by(plan, costs, kind, numbering.stages(places, kind), numbering.numbers(places, kind))
        np.add.at(change, uses.rows[counts], sign * held)
        if sign > 0:
            np.add.at(made, uses.rows[counts], held)


def held_by(plan: PlanData, costs: Costs, kind: Kind, stages: Ints, units: Ints) -> Amounts:
    """Return what values of a kind hold, an entry per stage and unit, times the plan's chunks and slices.

    Keys and values are one per microbatch, that of its first slice.
    """
    spec = plan.schedule
    if kind is not Kind.KEYS:
        return costs.of_units((HELD | HELD_BY_HOST)[kind], stages, units, spec)
    microbatches, slices = np.divmod(units, spec.slices)
    held: Amounts = costs.of_microbatches("keys", stages, microbatches, spec) * (slices == 0)
    return held


def peak_receives(plan: PlanData) -> tuple[int, ...]:
    """Return the most messages that each pp rank has received, in program order, and not yet taken."""
    columns, flows = plan.columns, plan.flows
    received = columns.are(Recv)
    makers = flows.first_makers[flows.consumes.places]
    of_message = (makers != ABSENT) & received[makers]
    change = received.astype(float)
    np.subtract.at(change, flows.consumes.rows[of_message], 1.0)
    return tuple(int(peak) for peak in _peaks(columns, change, np.maximum(change, 0.0)))


def while_running(columns: Columns, rank: int, net: Amounts, most: Amounts) -> Amounts:
    """Return how much a rank holds at most while each of its instructions runs."""
    rows = columns.rows_of(rank)
    mine = net[rows.start : rows.stop]
    return np.cumsum(mine) - mine + most[rows.start : rows.stop]


def _peaks(columns: Columns, net: Amounts, most: Amounts) -> list[float]:
    """Return the peak on each rank of what `net` adds up to, row by row."""
    ranks = range(columns.num_ranks)
    return [float(while_running(columns, rank, net, most).max(initial=0.0)) for rank in ranks]
