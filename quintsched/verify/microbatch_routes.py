"""Point 7, for stages and routes: every microbatch must pass through the same model.

    stage_to_part   0  1  1  0        route 0, 1    pieces 0, 1: the model
                                      route 2, 3    pieces 1, 0: another model, whose gradients would be added too

Each route visits all pieces of the model, once and in the model's order. Twins, which hold the same piece, are on
different ranks: a rank has one copy of a piece, and `SyncTied` sums the gradients of several copies. Skips and losses
belong to the stages of a single route.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quintsched.errors import counted
from quintsched.ir.instruction_values import MAX_SKIPS

if TYPE_CHECKING:
    from quintsched.ir.plan_data import PlanData


def piece_faults(plan: PlanData) -> Iterator[str]:
    """Yield the faults of `stage_to_part`, and of the order in which each route visits the pieces of the model."""
    stages = len(plan.stage_to_pp)
    pieces = tuple(range(stages)) if plan.stage_to_part is None else plan.stage_to_part
    if len(pieces) != stages:
        yield f"stage_to_part names {counted(len(pieces), 'stage')}, but there are {stages}"
        return
    held = sorted({*pieces})
    if held != [*range(len(held))]:
        yield f"stage_to_part must count the pieces of the model 0, 1, 2, … and leave none out; it names {held}"
        return
    for number, route in enumerate(plan.routes):
        visited = [pieces[stage] for stage in route.stages if 0 <= stage < stages]
        if visited != held:
            yield (
                f"route {number} visits the pieces of the model in the order {visited}; each route must visit all of "
                f"them, once and in the model's order, {held}"
            )
    holders: dict[tuple[int, int], int] = {}
    for stage, place in enumerate(zip(pieces, plan.stage_to_pp, strict=True)):
        first = holders.setdefault(place, stage)
        if first != stage:
            yield (
                f"stages {first} and {stage} hold the same piece of the model, {place[0]}, both on pipeline rank "
                f"{place[1]}; twins are on different ranks"
            )


def skip_faults(plan: PlanData) -> Iterator[str]:
    """Yield the faults of a plan's skips: the stage that makes each, and those that take it."""
    if plan.skips and len(plan.routes) != 1:
        yield f"skips: the microbatches of {plan.schedule.name} take {len(plan.routes)} routes; skips need a single one"
        return
    if len(plan.skips) > MAX_SKIPS:
        yield f"skips: {len(plan.skips)} names are more than {MAX_SKIPS}"
    for name, stages in plan.skips.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 200:
            yield f"skips: {name!r} is not a name that a block's forward can take"
        route = plan.routes[0].stages
        unknown = [stage for stage in stages if type(stage) is not int or stage not in route]
        places = [route.index(stage) for stage in stages if stage not in unknown]
        if unknown:
            yield f"skips: {name!r} names stage {unknown[0]}; the plan has the stages 0 to {len(plan.stage_to_pp) - 1}"
        elif len(stages) < 2 or sorted({*places}) != places:
            yield (
                f"skips: {name!r} must name the stage that makes it, then those that take it, each once and later on "
                f"the route than the one before; it names {stages}"
            )
        elif empty := [stage for stage in stages if stage in _without_blocks(plan)]:
            yield f"skips: {name!r} names stage {empty[0]}, which has no blocks to make or take it"


def loss_faults(plan: PlanData) -> Iterator[str]:
    """Yield the faults of a plan's list of stages with a loss."""
    if plan.losses and len(plan.routes) != 1:
        yield (
            f"losses: the microbatches of {plan.schedule.name} take {len(plan.routes)} routes, of which only the last "
            "stage can have one"
        )
    elif plan.losses:
        route = plan.routes[0].stages
        known = {stage for stage in plan.losses if type(stage) is int and stage in route}
        if sorted(known, key=route.index) != [*plan.losses] or plan.losses[-1:] != route[-1:]:
            yield (
                "losses must name stages in the order of the route, each once, and end with the last one; they are "
                f"{plan.losses}, of the route {route}"
            )
        elif empty := [stage for stage in plan.losses[:-1] if stage in _without_blocks(plan)]:
            yield f"losses: stage {empty[0]} has no blocks that could return one"


def _without_blocks(plan: PlanData) -> frozenset[int]:
    return frozenset(stage for stage, blocks in enumerate(plan.blocks_per_stage) if not blocks)
