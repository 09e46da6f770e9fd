"""Compile mesh size, microbatches and a schedule into a plan, and prove it.

schedule ─▶ order of computation ─▶ passes ─▶ plan ─▶ check
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from quintsched.collectives.timing import Wire
from quintsched.errors import UnsoundError, UsageError
from quintsched.ir.instructions import ALL, Compute
from quintsched.ir.layout import Route, Zero
from quintsched.ir.mesh import Mesh
from quintsched.passes import FORWARD_PASSES, TRAIN_PASSES, Watch, lower
from quintsched.plan import MAX_BUCKETS, Plan, Program, ScheduleSpec
from quintsched.schedules import Schedule, Shape, find_schedule, own_code
from quintsched.simulation.costs import Costs
from quintsched.verify.collectives import spell_out
from quintsched.verify.soundness import check_order
from quintsched.verify.wellformed import recompute_faults, tied_faults, zero_faults

ORDER = "order"
"""What the plan is called that no pass has touched, where plans are named by the pass before them."""


def compile(
    schedule: str | Schedule,
    *,
    mesh: Mesh | str,
    microbatches: int,
    chunks: int | None = None,
    buckets_per_stage: int = 1,
    stage_to_pp: Sequence[int] | None = None,
    slices: int = 1,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    recompute: int | Sequence[int] = 0,
    tied: Mapping[str, Sequence[int]] | None = None,
    communication: str = "native",
    wire: Wire | None = None,
    zero: int = 0,
    zero_every: int = 1,
    after: Watch | None = None,
) -> Plan:
    """Compile a plan and prove it sound under the strictest transport profile, `blocking`.

    Args:
        schedule: a registered name ("1f1b", …) or a `Schedule` of your own.
        mesh: the device mesh, e.g. `Mesh(dp=2, pp=2, tp=2)` or "dp=2,pp=2,tp=2".
        microbatches: how many microbatches each replica's share of the batch is cut into.
        chunks: stages per pipeline rank; None takes the fewest that the schedule allows.
        buckets_per_stage: gradient buckets of a stage.
        stage_to_pp: which pipeline rank holds which stage; None takes the schedule's own placement.
        slices: pieces of a microbatch along the sequence, for schedules that take them.
        costs: what to plan with, for schedules that search.
        memory_cap: the most activations that a rank may hold, in microbatches of a whole rank, for the same.
        recompute: 0 keeps all activations from a forward to its backward, 1 drops and recomputes them, k does so for
            every k-th block of a stage; one number for all stages, or one per stage.
        tied: named weights that several stages hold, and which: {"embedding": (0, 3)}. Their gradients are added up.
        communication: how gradients are summed over replicas: "native" leaves it to the library, "ring" and "tree"
            spell it out in messages, "auto" takes what is fastest for a message's size.
        wire: the latency and bandwidth that "auto" reckons with.
        zero: what replicas share out instead of each holding all of it: 0 nothing, 1 the optimizer's state, 2 gradients
            too, 3 weights too.
        zero_every: with 2 and 3, after how many microbatches of a stage its gradients are reduced.
        after: called with "order" and the bare order of computation, then with each pass's name and the plan after
            it; each pass then has to keep the points that hold by then, not only the last one.

    Raises:
        UsageError: an unknown name, or sizes that the schedule does not take (it names the nearest that work).
        UnsoundError: a schedule of your own that fails, or whose order cannot run; the message is the
            counter-example. If it is a pass that breaks a point, the message names it.
    """
    found = find_schedule(schedule) if isinstance(schedule, str) else schedule
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if type(buckets_per_stage) is not int or not 1 <= buckets_per_stage <= MAX_BUCKETS:
        raise UsageError(f"buckets_per_stage is {buckets_per_stage!r}; give a whole number from 1 to {MAX_BUCKETS}")
    shape = found.shape(mesh.pp, microbatches, chunks, slices, costs, memory_cap)
    if stage_to_pp is not None:
        shape = replace(shape, stage_to_pp=tuple(stage_to_pp))
    shape = replace(shape, recompute=_per_stage(recompute, found, shape))
    order = _with_tied(order_of_computation(found, shape, mesh, buckets_per_stage), tied or {})
    order = replace(order, zero=_zero(zero, zero_every, order))
    check_order(order).raise_if_unsound()
    if after:
        after(ORDER, order)
    passes = TRAIN_PASSES if order.mode == "train" else FORWARD_PASSES
    plan = spell_out(lower(order, passes, watch=after, verify=after is not None), communication, wire)
    verdict = plan.check(profile="blocking")
    if not verdict.sound:
        lower(order, passes, verify=True)  # slow, and names the pass that is to blame
    verdict.raise_if_unsound()
    return plan


def evaluation_of(plan: Plan) -> Plan:
    """Return the plan that runs forward, only, what `plan` trains: of the same shape, with weights shared out alike."""
    return compile(
        "inference",
        mesh=plan.mesh,
        microbatches=plan.schedule.microbatches,
        chunks=plan.schedule.chunks,
        stage_to_pp=plan.stage_to_pp[: len(plan.routes[0].stages)],
        zero=plan.zero.stage if plan.zero.shares_weights else 0,
    )


def _per_stage(recompute: int | Sequence[int], schedule: Schedule, shape: Shape) -> tuple[int, ...]:
    """Return how each stage is recomputed, () for no stage at all; raises `UsageError`."""
    num_stages = len(shape.stage_to_pp)
    asked = tuple(recompute) if isinstance(recompute, Sequence) else (recompute,) * num_stages
    for fault in recompute_faults(asked, num_stages, schedule.mode):
        raise UsageError(f"{schedule.name}: {fault}")
    return asked if any(asked) else ()


def _with_tied(order: Plan, tied: Mapping[str, Sequence[int]]) -> Plan:
    """Return the order with named weights tied; raises `UsageError`."""
    if not tied:
        return order
    held = {name: tuple(stages) if isinstance(stages, Sequence) else (stages,) for name, stages in tied.items()}
    plan = replace(order, tied=held)
    for fault in tied_faults(plan):
        raise UsageError(f"{plan.schedule.name}: {fault}")
    return plan


def _zero(stage: int, every: int, order: Plan) -> Zero:
    """Return what replicas share out; raises `UsageError`."""
    zero = Zero(stage, every)
    for fault in zero_faults(zero, order.mesh, order.mode):
        raise UsageError(f"{order.schedule.name}: {fault}")
    return zero


def order_of_computation(schedule: Schedule, shape: Shape, mesh: Mesh, buckets_per_stage: int = 1) -> Plan:
    """Return the plan that holds only what the schedule says: which computations, in which order."""
    stages = range(len(shape.stage_to_pp))
    half = len(stages) // 2
    options = {} if shape.memory_cap is None else {"memory_cap": shape.memory_cap}
    return Plan(
        mode=schedule.mode,
        schedule=ScheduleSpec(schedule.name, shape.microbatches, shape.chunks, shape.slices, options),
        mesh=mesh,
        stage_to_pp=shape.stage_to_pp,
        routes=_routes(schedule, shape),
        buckets_per_stage=buckets_per_stage,
        programs=tuple(_program(schedule, rank, shape) for rank in range(shape.pp)),
        stage_to_part=tuple(stage % half for stage in stages) if schedule.bidirectional else None,
        recompute=shape.recompute,
    )


def _routes(schedule: Schedule, shape: Shape) -> tuple[Route, ...]:
    """One route through all stages, or two through half of the stages with half of the microbatches each."""
    stages, units = range(len(shape.stage_to_pp)), range(shape.num_units)
    if not schedule.bidirectional:
        return (Route(tuple(stages), tuple(units)),)
    half, middle = len(stages) // 2, len(units) // 2
    return (
        Route(tuple(stages[:half]), tuple(units[:middle])),
        Route(tuple(stages[half:]), tuple(units[middle:])),
    )


def _program(schedule: Schedule, rank: int, shape: Shape) -> Program:
    """Return one rank's order; raises `UnsoundError` where the schedule's own code fails or yields something else."""
    where = f"{schedule.name} at pp={shape.pp}, {shape.microbatches} microbatches, {shape.chunks} chunks, rank {rank}"
    most = sum(issubclass(kind, Compute) for kind in ALL) * shape.num_units * len(shape.stages_of(rank))
    with own_code(where):
        program = tuple(islice(schedule.order(rank, shape), most + 1))  # one too many is enough to refuse it
    for index, found in enumerate(program):
        if not isinstance(found, Compute):
            raise UnsoundError(f"{where}: the schedule yields {found!r} at {index}; it may yield computations only")
    return program
