"""Duration of each instruction of a plan under a cost model.

    Fwd        f + x                       f: forward, x: exchange, the communication inside the stage (of tp, cp, ep)
    Bwd        b + y                       b: backward_input + backward_weight, y: exchange_backward
    Overlap    max(f + b, f + x, b + y)    one side exchanges while the other computes
    SendAct    latency + size / bandwidth  of the wire between the two ranks; likewise LendAct, ReturnAct
    OffloadAct latency + activation / bandwidth  of the link to the host
    OptStep    optimizer, of its stages    and so on: the sum of the costs that each class names

The parts of computations are given by `computation_times` and `exchange_times`, for any stages and microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from quintsched.graph.event_graph import Times
from quintsched.graph.events_and_channels import Events
from quintsched.ir.instruction_columns import FIELDS, Ints
from quintsched.ir.instruction_set import (
    ALL,
    COMPUTATIONS,
    LOANS,
    SKIP_MESSAGES,
    Bwd,
    Compute,
    Fwd,
    HostCopy,
    Instruction,
    Message,
    OnBucket,
    Overlap,
    RecvAct,
    Send,
    SendGrad,
)
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulated_weights_grads_optimizer_memory import bucket_share

BETWEEN_INPUTS = (RecvAct, SendGrad)
"""Messages that name the stage whose input (or its gradient) they carry; the others name the stage of the output."""


def event_durations(plan: PlanData, events: Events, costs: Costs) -> Times:
    """Return the duration of each event, times the plan's chunks and slices (so that whole numbers stay exact)."""
    columns = plan.columns
    durations = np.zeros(len(columns))
    for kind in ALL:
        rows = columns.rows_where(kind)
        if kind.costs and len(rows):
            durations[rows] = _durations(kind, rows, plan, costs)
    return durations[events.first_rows]


def computation_times(kind: type[Compute], stages: Ints, units: Ints, plan: PlanData, costs: Costs) -> Times:
    """Return the times of computations of one class without their exchanges, one entry per stage and unit.

    All times in this module are multiplied by the plan's chunks and slices.
    """
    return _added(kind.costs, stages, units, plan, costs)


def exchange_times(kind: type[Compute], stages: Ints, units: Ints, plan: PlanData, costs: Costs) -> Times:
    """Return the times of the communication inside such computations, likewise."""
    return _added(kind.exchanges, stages, units, plan, costs)


def _added(names: Iterable[str], stages: Ints, units: Ints, plan: PlanData, costs: Costs) -> Times:
    total = np.zeros(len(stages))
    for name in names:
        total += costs.of_units(name, stages, units, plan.schedule)
    return total


def exposed_exchanges(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return the time that each pp rank spends on communication inside stages that no computation hides."""
    columns = plan.columns
    exposed = np.zeros(len(columns))
    for kind in COMPUTATIONS:
        rows = columns.rows_where(kind)
        exposed[rows] = exchange_times(kind, columns.stage[rows], columns.unit[rows], plan, costs)
    rows = columns.rows_where(Overlap)
    exposed[rows] = _overlaps(rows, plan, costs)[1]
    of_ranks = (exposed[rows.start : rows.stop] for rows in map(columns.rows_of, range(columns.num_ranks)))
    return tuple(math.fsum(of_rank.tolist()) / plan.schedule.parts for of_rank in of_ranks)


def _overlaps(rows: Ints, plan: PlanData, costs: Costs) -> tuple[Times, Times]:
    """Return the computation time of these overlaps, and the exchange time beyond it that remains exposed.

    The sides compute one after the other, and each exchanges while the other computes.
    """
    sides = [(kind, *plan.columns.pairs(name, rows)) for kind, name in ((Fwd, "forward"), (Bwd, "backward"))]
    forward, backward = (computation_times(*side, plan, costs) for side in sides)
    of_forward, of_backward = (exchange_times(*side, plan, costs) for side in sides)
    return forward + backward, np.maximum(np.maximum(of_forward - backward, of_backward - forward), 0.0)


def _durations(kind: type[Instruction], rows: Ints, plan: PlanData, costs: Costs) -> Times | float:
    """Return the durations of instructions of one class, from the costs that the class names."""
    columns = plan.columns
    if issubclass(kind, Message):
        return _message_times(kind, rows, plan, costs)
    if kind is Overlap:
        return np.add(*_overlaps(rows, plan, costs))
    if issubclass(kind, Compute):
        return _added((*kind.costs, *kind.exchanges), columns.stage[rows], columns.unit[rows], plan, costs)
    if issubclass(kind, HostCopy):
        moved = costs.of_units("activation", columns.stage[rows], columns.unit[rows], plan.schedule)
        return costs.host_latency * plan.schedule.parts + moved / (costs.host_bandwidth or math.inf)
    stages = range(len(plan.stage_to_pp))
    once: Times = np.array([_once(plan, costs, kind, stage) for stage in stages])
    if issubclass(kind, OnBucket):
        buckets = range(max(plan.layout.buckets) + 1)
        of_bucket: Times = np.array([[bucket_share(plan, costs, s, b) for b in buckets] for s in stages])
        return of_bucket[columns.stage[rows], columns.column("bucket")[rows]] * once[columns.stage[rows]]
    if kind.whole_mesh:
        held = (plan.layout.stages_of(rank) for rank in range(columns.num_ranks))
        return max(float(sum(once[stage] for stage in of_rank)) for of_rank in held)
    if "stages" in FIELDS[kind]:
        return np.array([sum(once[stage] for stage in named) for named in columns.values("stages", rows)])
    return once[columns.stage[rows]]


def _message_times(kind: type[Message], rows: Ints, plan: PlanData, costs: Costs) -> Times | float:
    columns = plan.columns
    stages, units = columns.stage[rows], columns.unit[rows]
    ends = (columns.rank[rows], columns.peer[rows])
    sources, destinations = ends if issubclass(kind, Send) else ends[::-1]
    if issubclass(kind, LOANS):
        return loan_times(plan, costs, stages * plan.schedule.num_units + units, sources, destinations)
    alike = costs.message_time
    if alike is not None:
        return alike * plan.schedule.parts
    if issubclass(kind, BETWEEN_INPUTS):
        stages = plan.layout.all_before(stages, units)
    if issubclass(kind, SKIP_MESSAGES):  # as large as the output of the stage that makes the skip
        stages = np.array([plan.skips[name][0] for name in columns.values("skip", rows)])
    return costs.message_times(stages, units, sources, destinations, plan.schedule) * plan.schedule.parts


def loan_times(plan: PlanData, costs: Costs, cells: Ints, sources: Ints, destinations: Ints) -> Times:
    """Return the times of messages with lent activations; cell = stage x units + unit."""
    sizes = loan_sizes(plan, costs, *np.divmod(cells, plan.schedule.num_units))
    return costs.transfer_times(sizes, sources, destinations) * plan.schedule.parts


def loan_sizes(plan: PlanData, costs: Costs, stages: Ints, units: Ints) -> Times:
    """Return the sizes of messages with lent activations, in the unit of `message_sizes`."""
    return costs.of_units("activation_message", stages, units, plan.schedule) / plan.schedule.parts


def _once(plan: PlanData, costs: Costs, kind: type[Instruction], stage: int) -> float:
    """Return the time of an instruction that runs once for a stage, times the plan's chunks and slices."""
    return sum(costs.of_stage(name, stage, plan.schedule.chunks, plan.schedule.slices) for name in kind.costs)
