"""Peak activation memory of each rank, and its peak of messages received but not yet consumed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quintsched.ir.instruction_columns import ABSENT, Amounts, Columns, Ints
from quintsched.ir.instruction_set import LOANS, Overlap, Recv
from quintsched.ir.instruction_values import ValueKind
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs

HELD = {
    ValueKind.CHECKPOINT: "activation_checkpointed",
    ValueKind.SAVED: "activation",
    ValueKind.FETCHED: "activation",
    ValueKind.PENDING: "activation_after_input",
}
"""Kinds of values that count as activations, with the cost that gives their size."""

HELD_FOR_OTHERS = {ValueKind.LENT: "activation"}
"""Kinds of other ranks' activations, held from the start of the computation before their `HoldAct` on."""

HELD_BY_HOST = {ValueKind.OFFLOADED: "activation"}
"""Kinds of activations in host memory."""


def peak_activations(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of `activation` costs, in microbatches of a whole rank at unit costs."""
    parts = plan.schedule.parts
    return tuple(peak / parts for peak in _peaks(plan.columns, *activation_changes(plan, costs)))


def peak_host(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of activations in host memory, in the same unit."""
    net, _ = _changes(plan, costs, HELD_BY_HOST)
    return tuple(peak / plan.schedule.parts for peak in _peaks(plan.columns, net, np.maximum(net, 0.0)))


class Changes(NamedTuple):
    """Per row: the net change of its rank's memory, and the increase above the previous level while it runs."""

    net: Amounts
    most: Amounts


def activation_changes(plan: PlanData, costs: Costs) -> Changes:
    """Return the changes of activation memory by each row, times the plan's chunks and slices.

    An activation is held from its forward to the end of its backward. Between the halves of a backward
    `activation_after_input` is held instead, between a forward and its recomputation `activation_checkpointed`; in host
    memory it does not count, and while it is lent it counts on the rank that holds it (`HELD_FOR_OTHERS`). The keys and
    values of a microbatch count with its first slice. While an `Overlap` runs, the activations of its forward are held
    beside those of its backward.
    """
    change, made = _changes(plan, costs, held_kinds(plan))
    most = np.where(plan.columns.are(Overlap), made, np.maximum(change, 0.0))
    lent, received = _changes(plan, costs, HELD_FOR_OTHERS)
    return Changes(change + lent, most + received)


def held_kinds(plan: PlanData) -> tuple[ValueKind, ...]:
    """Return the kinds of values that count as activations of a plan."""
    return (*HELD, ValueKind.KEYS) if plan.schedule.slices > 1 else tuple(HELD)


def _changes(plan: PlanData, costs: Costs, kinds: Iterable[ValueKind]) -> tuple[Amounts, Amounts]:
    """Return the net change by each row of values of these kinds, and the amount that it produces."""
    change, made = np.zeros((2, len(plan.columns)))
    for kind in kinds:
        _add(change, made, plan, costs, kind)
    return change, made


def _add(change: Amounts, made: Amounts, plan: PlanData, costs: Costs, kind: ValueKind) -> None:
    """Add to `change` the sizes of a kind's values that each row produces, less those that it consumes.

    Produced sizes are added to `made` as well.
    """
    numbering = plan.flows.numbering
    for uses, sign in ((plan.flows.produces, 1.0), (plan.flows.consumes, -1.0)):
        counts = np.flatnonzero(numbering.of_kind(uses.places, kind))
        places, rows = uses.places[counts], uses.rows[counts]
        if kind in HELD_FOR_OTHERS and sign > 0:
            rows = plan.columns.computation_before(rows)
        held = held_by(plan, costs, kind, numbering.stages(places, kind), numbering.numbers(places, kind))
        np.add.at(change, rows, sign * held)
        if sign > 0:
            np.add.at(made, rows, held)


def held_by(plan: PlanData, costs: Costs, kind: ValueKind, stages: Ints, units: Ints) -> Amounts:
    """Return the sizes of a kind's values, one entry per stage and unit, times the plan's chunks and slices.

    Keys and values are counted once per microbatch, with its first slice.
    """
    spec = plan.schedule
    if kind is not ValueKind.KEYS:
        return costs.of_units((HELD | HELD_FOR_OTHERS | HELD_BY_HOST)[kind], stages, units, spec)
    microbatches, slices = np.divmod(units, spec.slices)
    held: Amounts = costs.of_microbatches("keys", stages, microbatches, spec) * (slices == 0)
    return held


def peak_receives(plan: PlanData) -> tuple[int, ...]:
    """Return each pp rank's peak number of messages received and not yet consumed, in program order.

    Lent activations are counted as activations, not here.
    """
    columns, flows = plan.columns, plan.flows
    received = columns.are(Recv) & ~columns.are(*LOANS)
    makers = flows.first_makers[flows.consumes.places]
    of_message = (makers != ABSENT) & received[makers]
    change = received.astype(float)
    np.subtract.at(change, flows.consumes.rows[of_message], 1.0)
    return tuple(int(peak) for peak in _peaks(columns, change, np.maximum(change, 0.0)))


def while_running(columns: Columns, rank: int, net: Amounts, most: Amounts) -> Amounts:
    """Return the peak of a rank's memory while each of its instructions runs."""
    rows = columns.rows_of(rank)
    mine = net[rows.start : rows.stop]
    return np.cumsum(mine) - mine + most[rows.start : rows.stop]


def _peaks(columns: Columns, net: Amounts, most: Amounts) -> list[float]:
    """Return the peak of the running sum of `net` on each rank."""
    ranks = range(columns.num_ranks)
    return [float(while_running(columns, rank, net, most).max(initial=0.0)) for rank in ranks]
