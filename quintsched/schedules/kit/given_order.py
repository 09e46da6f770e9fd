"""Schedule whose order of computation is given: by a solver, by a recorded run, or by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quintsched.errors import UsageError, counted
from quintsched.ir.instruction_set import COMPUTING, Compute, Overlap, Recompute
from quintsched.ir.layout import equal_routes
from quintsched.ir.plan_data import PlanData
from quintsched.schedules.kit.registry import Order, Schedule, Shape

SOLVED = "solved"
"""Name of the schedule of solved plans."""


def schedule_of_rows(
    rows: Sequence[Sequence[Compute | Overlap]],
    stage_to_pp: tuple[int, ...],
    pp: int,
    name: str = SOLVED,
    *,
    bidirectional: bool = False,
) -> Schedule:
    """Return the schedule in which each rank computes its row, in order; `bidirectional`: as `Schedule` has it."""
    chunks = max(1, len(stage_to_pp) // pp // (1 + bidirectional))

    def order(rank: int, shape: Shape) -> Order:
        return rows[rank]

    def placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
        if num_ranks != pp:
            raise UsageError(f"{name}: its order is of {counted(pp, 'pipeline rank')}, not of {num_ranks}")
        return stage_to_pp

    return Schedule(
        name,
        order,
        "a given order",
        placement=placement,
        min_chunks=chunks,
        max_chunks=chunks,
        bidirectional=bidirectional,
    )


def schedule_of_plan(plan: PlanData, name: str) -> Schedule:
    """Return the schedule with a plan's order of computation, for plans of equal sizes with other settings.

    Raises:
        UsageError: a plan that does not train, or with slices or routes of its own; `name` is that of the plan.
    """
    is_two_way = plan.routes == equal_routes(2, len(plan.stage_to_pp), plan.schedule.num_units)
    if plan.mode != "train" or plan.schedule.slices != 1 or (len(plan.routes) != 1 and not is_two_way):
        raise UsageError(
            f"{name}: only the order of a plan that trains whole sequences, on one route or on two in opposite "
            "directions, is a schedule"
        )
    kinds = tuple(kind for kind in COMPUTING if kind is not Recompute)
    rows = [[i for i in program if isinstance(i, kinds)] for program in plan.programs]
    microbatches = plan.schedule.microbatches

    def fault(shape: Shape) -> str | None:
        if shape.microbatches == microbatches:
            return None
        return f"{name} has the order of {counted(microbatches, 'microbatch')}, not of {shape.microbatches}"

    sizes = plan.stage_to_pp, plan.mesh.pp, plan.schedule.name
    found = schedule_of_rows(rows, *sizes, bidirectional=is_two_way)  # type: ignore[arg-type]
    return replace(found, constraint=fault)
