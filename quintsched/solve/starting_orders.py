"""Starting points of a search: the orders of all named schedules that fit, under the problem's own costs and caps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from quintsched.errors import InputError, UnsoundError, UsageError
from quintsched.schedules import Schedule, Shape, all_schedules, find_schedule
from quintsched.schedules.kit.constraints import slot_by_slot
from quintsched.schedules.kit.stage_placements import v
from quintsched.simulation.costs import Costs
from quintsched.solve.order_problem import EPSILON
from quintsched.solve.order_timing import time_orders
from quintsched.solve.periodic.repeated_v_patterns import v_block_orders, v_blocks
from quintsched.solve.search_problem import Problem

MOST_BLOCKS, BEST_BLOCKS = 800, 4
"""Blocks of a V that are tried with few microbatches, and those that are then tried with all."""


def named_orders(problem: Problem, costs: Costs | None, *names: str) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield name and orders of each schedule (of `names`) that has this placement, whether it keeps to caps or not."""
    for schedule in map(find_schedule, names) if names else all_schedules():
        shape = _shape(schedule, problem, costs)
        if shape is not None:
            yield schedule.name, [problem.numbers(schedule.order(rank, shape)) for rank in range(problem.pp)]
    for orders in () if names else _orders_of_v_blocks(problem):
        yield "blocks of a V", orders


def _orders_of_v_blocks(problem: Problem) -> Iterator[list[list[int]]]:
    """Yield the orders of the blocks of a V that are best for few microbatches; none where ZBV has room."""
    is_v = problem.routes == 1 and problem.stage_to_pp == v(problem.pp, 2)
    if not is_v or not problem.are_alike or math.isinf(min(problem.caps)):
        return
    largest = max(problem.reserved[: problem.num_stages * problem.microbatches])
    most = min(problem.caps) / largest * (1 + EPSILON) if largest > 0 else math.inf
    chunks = math.floor(min(most, 2 * problem.pp))
    shape = Shape(problem.pp, problem.microbatches, 2, problem.stage_to_pp)
    if chunks >= 2 * problem.pp or slot_by_slot(shape):
        return
    few = problem.shortened(min(problem.microbatches, 2 * problem.pp))
    found = []
    for number, block in enumerate(islice(v_blocks(problem.pp), MOST_BLOCKS)):
        rows = v_block_orders(replace(shape, microbatches=few.microbatches), chunks, block)
        timing = time_orders(few, [*map(few.numbers, rows)]) if rows else None
        if timing is not None:
            found.append((max(timing.spans), number, block))
    for _, _, block in sorted(found)[:BEST_BLOCKS]:
        every = v_block_orders(shape, chunks, block)
        if every is not None:
            yield [*map(problem.numbers, every)]


def _shape(schedule: Schedule, problem: Problem, costs: Costs | None) -> Shape | None:
    """Return the shape for which a schedule is asked; None where it does not fit."""
    routes, microbatches = 1 + schedule.bidirectional, problem.microbatches * problem.routes
    others = schedule.mode != "train" or routes != problem.routes or schedule.routes is not None
    if others or not schedule.built_in:
        return None
    chunks = problem.num_stages // problem.pp // routes
    cap = min(problem.caps)
    costs, cap_or_none = (costs, None if math.isinf(cap) else cap) if schedule.searches else (None, None)
    try:
        shape = schedule.shape(problem.pp, microbatches, chunks, costs=costs, memory_cap=cap_or_none)
    except (UsageError, UnsoundError, InputError):
        return None
    return shape if shape.stage_to_pp == problem.stage_to_pp else None
