"""Starting points of a search: the orders of all named schedules that fit, under the problem's own costs and caps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from quintsched.errors import InputError, UnsoundError, UsageError
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.ir.placement import v
from quintsched.schedules import Order, Schedule, Shape, all_schedules
from quintsched.schedules.kit.constraints import slot_by_slot
from quintsched.schedules.v_half import all_ranks, least_chunks
from quintsched.simulation.costs import Costs
from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF, Problem

KINDS: dict[type[Compute], tuple[int, ...]] = {
    Fwd: (FORWARD,),
    BwdInput: (INPUT_HALF,),
    BwdWeight: (WEIGHT_HALF,),
    Bwd: (INPUT_HALF, WEIGHT_HALF),
}
"""Computations of a problem that an instruction stands for."""


def named_orders(problem: Problem, costs: Costs | None) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield name and orders of each registered schedule that has this placement, whether it keeps to caps or not."""
    for schedule in all_schedules():
        shape = _shape(schedule, problem, costs)
        if shape is not None:
            yield schedule.name, _orders([schedule.order(rank, shape) for rank in range(problem.pp)], problem)
    wider = _wider_v_half(problem)
    if wider is not None:
        yield "v-half in the memory of the cap", wider


def _wider_v_half(problem: Problem) -> list[list[int]] | None:
    """Return the orders of V-Half with as many chunks in flight as the caps allow; None if it has as many itself."""
    if problem.stage_to_pp != v(problem.pp, 2) or math.isinf(min(problem.caps)):
        return None
    each = problem.num_stages * problem.microbatches
    largest = max(problem.reserved[:each])
    room = math.floor(min(problem.caps) / largest * (1 + EPSILON)) if largest > 0 else 0
    chunks = min(room, 2 * problem.pp)
    shape = Shape(problem.pp, problem.microbatches, 2, problem.stage_to_pp)
    if chunks <= least_chunks(problem.pp) or slot_by_slot(shape):
        return None
    return _orders(all_ranks(shape, chunks), problem)


def _shape(schedule: Schedule, problem: Problem, costs: Costs | None) -> Shape | None:
    """Return the shape for which a schedule is asked; None where it does not fit."""
    if schedule.mode != "train" or schedule.bidirectional or schedule.routes is not None or not schedule.built_in:
        return None
    chunks = problem.num_stages // problem.pp
    cap = min(problem.caps)
    costs, cap_or_none = (costs, None if math.isinf(cap) else cap) if schedule.searches else (None, None)
    try:
        shape = schedule.shape(problem.pp, problem.microbatches, chunks, costs=costs, memory_cap=cap_or_none)
    except (UsageError, UnsoundError, InputError):
        return None
    return shape if shape.stage_to_pp == problem.stage_to_pp else None


def _orders(every: Iterable[Order], problem: Problem) -> list[list[int]]:
    return [
        [
            problem.number(kind, side.stage, side.microbatch)
            for found in order
            for side in found.sides
            if isinstance(side, Compute)
            for kind in KINDS.get(type(side), ())
        ]
        for order in every
    ]
