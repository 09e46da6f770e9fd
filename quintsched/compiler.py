"""Compiler from a schedule, a mesh and a number of microbatches to a plan that is proved sound.

request ─▶ schedule ─▶ order of computation ─▶ passes ─▶ plan ─▶ check
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import zip_longest
from textwrap import wrap
from typing import Any, ParamSpec

from quintsched.errors import UnsoundError, UsageError, nearest
from quintsched.formats.plan_json import least_size
from quintsched.import_user_code import load_schedule
from quintsched.ir.instruction_set import Fwd
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import PlanData, ScheduleSpec, listed, shares_of
from quintsched.ir.zero_setting import Zero
from quintsched.passes import FORWARD_PASSES, TRAIN_PASSES, lower
from quintsched.passes.place_loans import place_loans
from quintsched.passes.place_offloads import ROUNDING, place_offloads
from quintsched.passes.place_spelled_collectives import spell_out
from quintsched.plan import Plan
from quintsched.request import CompileRequest, settings
from quintsched.request.recomputed_microbatches import Chosen, chosen_per_stage, read_recomputed, repeated
from quintsched.schedules import Schedule, Shape, all_schedules, find_schedule
from quintsched.schedules.kit.bare_order import order_of_computation
from quintsched.schedules.kit.given_order import schedule_of_plan
from quintsched.schedules.kit.routes import routes_of
from quintsched.schedules.kit.uneven_stages import StageRuns, find_runs
from quintsched.simulation.costs import Costs
from quintsched.verify.microbatch_routes import loss_faults, skip_faults
from quintsched.verify.recomputed_stages import recompute_faults, recomputed_microbatch_faults
from quintsched.verify.soundness import check, check_order
from quintsched.verify.wellformed import blocks_faults, tied_faults, zero_faults

ORDER = "order"
"""Name of the plan before any pass, as `after` receives it; later plans are named after the pass that made them."""

MOST_ASKED_AGAIN = 2**17
"""Maximum number of computations for which the order of a user's schedule is generated twice and compared."""

OF_ORDER = frozenset(
    ("schedule", "microbatches", "chunks", "stage_to_pp", "slices", "overlap", "memory_cap", "offload", "lend")
) | {"recompute", "recompute_microbatches"}
"""Settings that say in which order a plan computes, and what it does to need less memory."""
Asked = ParamSpec("Asked")

RIGHT_CALL = 'compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=8)'


def _taking(
    request: Callable[Asked, CompileRequest],
) -> Callable[[Callable[[CompileRequest], Plan]], Callable[Asked, Plan]]:
    """Give a function of a request the signature of the request class, and list the settings in its `Args`."""

    def decorate(function: Callable[[CompileRequest], Plan]) -> Callable[Asked, Plan]:
        @wraps(function)
        def call(*args: Asked.args, **options: Asked.kwargs) -> Plan:
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                raise UsageError(f"compile: {error}{_nearest(options)}; write {RIGHT_CALL}") from None
            return function(request(*args, **options))

        signature = inspect.signature(request)
        call.__signature__ = signature.replace(return_annotation=Plan)  # type: ignore[attr-defined]
        call.__doc__ = (function.__doc__ or "").replace("{settings}", "\n        ".join(_documented()))
        return call

    return decorate


def _nearest(options: Iterable[str]) -> str:
    """Return the setting nearest to one that there is not."""
    known = [name for name, _ in settings()]
    return "".join(nearest(name, known) for name in options if name not in (*known, "after"))


def _documented() -> Iterator[str]:
    """Yield the line or lines of documentation of each setting, for `help(compile)`."""
    for name, setting in settings():
        yield from wrap(f"{name}: {setting.doc}", 112, subsequent_indent="    ")


@_taking(CompileRequest)
def compile(request: CompileRequest) -> Plan:
    """Compile a plan and prove it sound under the strictest transport profile, `blocking`.

    Args:
        {settings}
        after: called with "order" and the bare order of computation, then with each pass's name and the plan after
            it; every pass is then checked for the points that have to hold after it, not only the last one.

    Raises:
        UsageError: an unknown name, or sizes that the schedule does not take (it names the nearest that work).
        UnsoundError: a user-defined schedule that fails, or whose order cannot run; the message is the
            counter-example. If a pass breaks a point, the message names the pass.
    """
    return compile_request(request)


Room = Callable[[int, int], None]
"""Callback that gets the least number of instructions of the plan and of bytes of its file; may raise anything."""


def compile_request(request: CompileRequest, room: Room | None = None) -> Plan:
    """Compile a request, as `compile` does; `room` is called before the work starts and may refuse it."""
    schedule, mesh = load_schedule(request.schedule), Mesh.parse(request.mesh)
    own, placed = schedule.placed(mesh.pp, request.chunks), _placed(schedule, request)
    runs = find_runs(schedule, own, placed)
    shape = replace(_shape(schedule, request, placed, runs), stage_to_pp=placed)
    shape = replace(shape, recompute=_per_stage(request.recompute, schedule, shape))
    shape = replace(shape, recompute_microbatches=_recomputed(request, schedule, shape))
    if room is not None:
        room(*least_size(placed, routes_of(schedule, shape), schedule.mode == "train"))
    with _placement_at_fault(schedule, own, placed):
        return _proved(_order(schedule, shape, mesh, request, runs), request)


def stages_of(request: CompileRequest) -> tuple[int, ...]:
    """Return the placement of a request's plan, the pipeline rank of each stage; raises `UsageError`."""
    return _placed(load_schedule(request.schedule), request)


def _placed(schedule: Schedule, request: CompileRequest) -> tuple[int, ...]:
    """Return the placement that the user gives, or else the schedule's own; raises `UsageError` for no such rank."""
    pp = Mesh.parse(request.mesh).pp
    own, wanted = schedule.placed(pp, request.chunks), request.stage_to_pp
    if wanted is None:
        return own
    if not wanted or not all(0 <= rank < pp for rank in wanted):
        raise UsageError(
            f"{schedule.name}: stage_to_pp is {_shown(wanted)}; name a pipeline rank from 0 to {pp - 1} "
            f"for each stage, like {_shown(own)}"
        )
    return tuple(wanted)


def _shape(schedule: Schedule, request: CompileRequest, placed: tuple[int, ...], runs: StageRuns | None) -> Shape:
    """Return the shape of the schedule's own stages (which `runs` expand to the plan's), with their costs."""
    pp, costs = Mesh.parse(request.mesh).pp, request.costs
    if schedule.searches:
        costs = _searched(schedule, request, placed, runs)
    sizes = (pp, request.microbatches, request.chunks, request.slices)
    if not schedule.searches and (request.offload, request.lend) != (None, None):
        costs = None
    return schedule.shape(*sizes, costs, request.memory_cap, overlap=request.overlap)


def _searched(
    schedule: Schedule, request: CompileRequest, placed: tuple[int, ...], runs: StageRuns | None
) -> Costs | None:
    """Return the costs that a searching schedule plans with, scaled by the blocks per stage where these are known."""
    pp, costs, blocks, slices = Mesh.parse(request.mesh).pp, request.costs, request.stages, max(request.slices, 1)
    if runs is None and len(placed) != len(schedule.placed(pp, request.chunks)):
        return costs
    if blocks and len(blocks) == len(placed):
        way = routes_of(
            schedule, Shape(pp, request.microbatches, request.chunks or schedule.min_chunks, placed, slices)
        )
        model = sum(blocks[stage] for stage in way[0].stages if stage < len(blocks))
        costs = (costs or Costs()).spread(shares_of(blocks, max(model, 1), pp), slices)
    if costs is None or runs is None:
        return costs
    counts = ScheduleSpec(schedule.name, request.microbatches, request.chunks or schedule.min_chunks, slices)
    costs.check_fits(counts, len(placed), pp)
    return runs.merge(costs)


def _order(schedule: Schedule, shape: Shape, mesh: Mesh, request: CompileRequest, runs: StageRuns | None) -> PlanData:
    """Return the checked order of computation, with all settings that the passes read."""
    order = order_of_computation(schedule, shape, mesh, request.buckets_per_stage, runs)
    _require_one_order(schedule, shape, order, runs)
    order = _with_blocks(order, request.stages)
    order = _with_tied(order, request.tied or {})
    order = _with_skips(order, request.skip or {})
    order = _with_losses(order, request.losses or ())
    order = replace(order, zero=_zero(request.zero, request.zero_every, order))
    check_order(order).raise_if_unsound()
    return order


def _proved(order: PlanData, request: CompileRequest) -> Plan:
    """Lower an order to a plan and prove it."""
    after = request.after
    watch = (lambda name, data: after(name, Plan.of(data))) if after else None
    if watch:
        watch(ORDER, order)
    passes = TRAIN_PASSES if order.mode == "train" else FORWARD_PASSES
    lowered = lower(order, passes, watch=watch, verify=watch is not None)
    placed = place_offloads(lowered, request.offload, request.costs)
    placed = place_loans(placed, request.lend, request.costs)
    plan = spell_out(placed, request.communication, request.wire)
    caps = [cap for cap in (request.offload, request.lend) if cap is not None and request.costs is None]
    verdict = check(plan, profile="blocking", memory_cap=min(caps) * (1 + ROUNDING) if caps else None)
    if not verdict.sound:
        lower(order, passes, verify=True)  # slow; raises with the name of the pass that broke the plan
    verdict.raise_if_unsound()
    return Plan.of(plan)


@contextmanager
def _placement_at_fault(schedule: Schedule, own: tuple[int, ...], placed: tuple[int, ...]) -> Iterator[None]:
    """Turn an `UnsoundError` into a `UsageError` that blames `stage_to_pp`, unless that is the schedule's own."""
    try:
        yield
    except UnsoundError as error:
        if placed == own:
            raise
        _, _, finding = str(error).partition("\n")
        raise UsageError(
            f"{schedule.name}: it cannot run with stage_to_pp={_shown(placed)}; its own placement is "
            f"{_shown(own)}. {(finding or str(error)).partition(chr(10))[0]}"
        ) from error


def _shown(stage_to_pp: Sequence[int]) -> str:
    """Return a placement as short text."""
    return f"[{listed(stage_to_pp).replace(',', ', ')}]"


def _require_one_order(schedule: Schedule, shape: Shape, order: PlanData, runs: StageRuns | None) -> None:
    """Raise `UnsoundError` if a user-defined schedule is not deterministic: called again, it yields another order."""
    if schedule.built_in or order.num_instructions > MOST_ASKED_AGAIN:
        return
    again = order_of_computation(schedule, shape, order.mesh, order.buckets_per_stage, runs)
    if again.columns == order.columns:
        return
    for rank, (first, second) in enumerate(zip(order.programs, again.programs, strict=True)):
        for index, (one, other) in enumerate(zip_longest(first, second)):
            if one != other:
                raise UnsoundError(
                    f"{schedule.name}: asked twice for rank {rank}, the schedule yields {one or 'nothing'} and then "
                    f"{other or 'nothing'} at {index}; every rank has to find the same order"
                )


def evaluation_of(plan: Plan) -> Plan:
    """Return the forward-only plan for evaluating a model that `plan` trains: same stages, placement and sharding.

    It is compiled and proved once for each plan, however many ranks of a process ask for it. A plan that only runs
    forward is its own.
    """
    return plan if plan.mode == "forward" else plan.remember("evaluation", lambda: _evaluation_of(plan))


def _evaluation_of(plan: Plan) -> Plan:
    first = plan.routes[0].stages
    in_order = first == tuple(range(len(first)))
    stages = len(first) if in_order else len(plan.stage_to_pp)
    return compile(
        "inference" if in_order else _inference_along(plan),
        mesh=plan.mesh,
        microbatches=plan.schedule.microbatches,
        chunks=plan.schedule.chunks,
        stage_to_pp=plan.stage_to_pp[:stages],
        stages=plan.blocks_per_stage[:stages] or None,
        skip=plan.skips,
        losses=plan.losses,
        zero=plan.zero.stage if plan.zero.shards_weights else 0,
    )


def _inference_along(plan: Plan) -> Schedule:
    """Return an inference schedule along a plan's first route; its other routes get no microbatches."""
    first, others = plan.routes[0].stages, plan.routes[1:]

    def order(rank: int, shape: Shape) -> Iterator[Fwd]:
        stages = (stage for stage in first if plan.stage_to_pp[stage] == rank)
        return (Fwd(stage, microbatch) for stage in stages for microbatch in range(shape.microbatches))

    def routes(shape: Shape) -> list[tuple[Sequence[int], Sequence[int]]]:
        return [(first, range(shape.microbatches)), *((route.stages, ()) for route in others)]

    return replace(find_schedule("inference"), order=order, routes=routes)


def compiled_again(plan: Plan, **changes: object) -> Plan | None:
    """Return the plan of the same request with some settings changed (microbatches=6, tied={…}).

    A plan whose schedule is not registered (solved, imported, of a user's file) keeps its order of computation: no
    name in a plan is resolved to code. Return None if it has no order for other microbatches, or if the plan does not
    compile again to itself: it was edited by hand, or compiled with costs, which no plan stores. For other
    microbatches, the choice of those that are recomputed is repeated.

    Raises:
        UsageError: the schedule does not take the changed settings.
    """
    try:
        request = _request_of(plan)
        if compile_request(request).to_json() != plan.to_json():
            return None
        if not _is_registered(plan) and changes.get("microbatches") not in (None, request.microbatches):
            return None
    except (UsageError, UnsoundError):
        return None
    changed = replace(request, **changes)  # type: ignore[arg-type]
    if plan.recompute_microbatches and changed.microbatches != request.microbatches:
        again = repeated(plan.recompute_microbatches, request.microbatches, changed.microbatches)
        every = [every if some else 0 for every, some in zip(plan.recompute, again, strict=True)]
        changed = replace(changed, recompute=every, recompute_microbatches=again if any(every) else None)
    return compile_request(changed)


def settings_beside_order(plan: Plan) -> dict[str, Any]:
    """Return what a plan was compiled with beside its order, and what it does to need less memory: mesh, stages, …"""
    return {name: value for name, value in _stored(plan).items() if name not in OF_ORDER and value is not None}


def _stored(plan: Plan) -> dict[str, Any]:
    return {name: setting.in_plan(plan) for name, setting in settings() if setting.in_plan is not None}


def _request_of(plan: Plan) -> CompileRequest:
    """Return the request that a plan was compiled from, as far as the plan stores it."""
    said = _stored(plan)
    if not _is_registered(plan):
        said["schedule"] = schedule_of_plan(plan, "the plan")
    return CompileRequest(**{name: value for name, value in said.items() if value is not None})


def _is_registered(plan: Plan) -> bool:
    return any(plan.schedule.name in (found.name, *found.aliases) for found in all_schedules())


def _per_stage(recompute: int | Sequence[int], schedule: Schedule, shape: Shape) -> tuple[int, ...]:
    """Return the recompute setting of each stage, () if no stage recomputes; raises `UsageError`."""
    num_stages = len(shape.stage_to_pp)
    asked = tuple(recompute) if isinstance(recompute, Sequence) else (recompute,) * num_stages
    for fault in recompute_faults(asked, num_stages, schedule.mode):
        raise UsageError(f"{schedule.name}: {fault}")
    return asked if any(asked) else ()


def _recomputed(request: CompileRequest, schedule: Schedule, shape: Shape) -> Chosen:
    """Return the microbatches that each stage recomputes, () if it is all of them; raises `UsageError`."""
    asked = read_recomputed("recompute_microbatches", request.recompute_microbatches)
    if asked is None:
        return ()
    routes = routes_of(schedule, shape)
    chosen = chosen_per_stage(asked, shape.recompute, routes, shape.slices)
    if chosen or not shape.recompute:
        for fault in recomputed_microbatch_faults(chosen, shape.recompute, routes, shape.slices):
            raise UsageError(f"{schedule.name}: {fault}")
    return chosen


def _with_blocks(order: PlanData, blocks: Sequence[int] | None) -> PlanData:
    """Return the order with this number of blocks per stage; raises `UsageError`."""
    if blocks is None:
        return order
    plan = replace(order, blocks_per_stage=tuple(blocks))
    for fault in blocks_faults(plan.blocks_per_stage, plan):
        raise UsageError(f"{plan.schedule.name}: stages: {fault}")
    return plan


def _with_tied(order: PlanData, tied: Mapping[str, Sequence[int]]) -> PlanData:
    """Return the order with named weights tied; raises `UsageError`."""
    if not tied:
        return order
    plan = replace(order, tied={name: tuple(stages) for name, stages in tied.items()})
    for fault in tied_faults(plan):
        raise UsageError(f"{plan.schedule.name}: {fault}")
    return plan


def _with_skips(order: PlanData, skips: Mapping[str, Sequence[int]]) -> PlanData:
    """Return the order with skips between its stages; raises `UsageError`."""
    if not skips:
        return order
    plan = replace(order, skips={name: tuple(stages) for name, stages in skips.items()})
    for fault in skip_faults(plan):
        raise UsageError(f"{plan.schedule.name}: {fault}")
    return plan


def _with_losses(order: PlanData, losses: Sequence[int]) -> PlanData:
    """Return the order with losses on these stages; raises `UsageError`."""
    plan = replace(order, losses=tuple(losses))
    for fault in loss_faults(plan):
        raise UsageError(f"{plan.schedule.name}: {fault}")
    return plan if len(losses) > 1 else order


def _zero(stage: int, every: int, order: PlanData) -> Zero:
    """Return the ZeRO setting, checked against the mesh; raises `UsageError`."""
    zero = Zero(stage, every)
    for fault in zero_faults(zero, order.mesh, order.mode):
        raise UsageError(f"{order.schedule.name}: {fault}")
    return zero
