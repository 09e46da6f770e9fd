"""Plan of a schedule's bare order of computation, before any pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quintsched.errors import UnsoundError, counted
from quintsched.ir.instruction_columns import Columns
from quintsched.ir.instruction_set import COMPUTATIONS, COMPUTING
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import PlanData, ScheduleSpec
from quintsched.ir.rank_programs import Programs
from quintsched.schedules.kit.registry import Schedule, Shape, own_code
from quintsched.schedules.kit.routes import parts_of, routes_of
from quintsched.schedules.kit.step_arrays import StepColumns
from quintsched.schedules.kit.uneven_stages import StageRuns


def order_of_computation(
    schedule: Schedule, shape: Shape, mesh: Mesh, buckets_per_stage: int = 1, runs: StageRuns | None = None
) -> PlanData:
    """Return the plan that holds only the schedule's computations, in its order.

    `runs` maps the schedule's stages to runs of stages of `shape`; None if they are the same.
    """
    routes = routes_of(schedule, shape)
    asked = {"memory_cap": shape.memory_cap, "overlap": shape.overlap or None}
    options = {name: value for name, value in asked.items() if value is not None}
    return PlanData(
        mode=schedule.mode,
        schedule=ScheduleSpec(schedule.name, shape.microbatches, shape.chunks, shape.slices, options),
        mesh=mesh,
        stage_to_pp=shape.stage_to_pp,
        routes=routes,
        buckets_per_stage=buckets_per_stage,
        programs=Programs(Columns.stack([*_programs(schedule, shape, runs)])),
        stage_to_part=parts_of(schedule, shape, routes),
        recompute=shape.recompute,
        recompute_microbatches=shape.recompute_microbatches,
    )


def _programs(schedule: Schedule, shape: Shape, runs: StageRuns | None) -> Iterator[Columns]:
    """Yield each rank's order, in terms of the plan's stages."""
    asked = shape if runs is None else runs.asked(shape)
    for rank in range(shape.pp):
        program = _program(schedule, rank, asked)
        yield program if runs is None else runs.expand(program, shape, f"{schedule.name}: rank {rank}")


def _program(schedule: Schedule, rank: int, shape: Shape) -> Columns:
    """Return one rank's order; raises `UnsoundError` if the schedule's code fails or yields no computation."""
    where = (
        f"{schedule.name} at pp={shape.pp}, {counted(shape.microbatches, 'microbatch')}, "
        f"{counted(shape.chunks, 'chunk')}, rank {rank}"
    )
    most = len(COMPUTATIONS) * shape.num_units * len(shape.stages_of(rank))
    with own_code(where):
        steps = schedule.order(rank, shape)
        if isinstance(steps, StepColumns):
            return steps.columns
        program = list(islice(steps, most + 1))  # one too many suffices to refuse an endless generator
    for index, found in enumerate(program):
        if not isinstance(found, COMPUTING):
            raise UnsoundError(f"{where}: the schedule yields {found!r} at {index}; it may yield computations only")
    try:
        return Columns.from_programs([program])
    except UnsoundError as error:
        raise UnsoundError(f"{where}: {str(error).removeprefix('rank 0 ')}") from None
