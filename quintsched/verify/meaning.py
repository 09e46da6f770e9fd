"""Point 7 for stages and routes: whatever way a microbatch takes, it sees the same model.

    stage_to_part   0  1  1  0        route 0, 1    pieces 0, 1: the model
                                      route 2, 3    pieces 1, 0: another one, and its gradients would be added up too

Each route visits all pieces of the model, once and in the model's order. Twins, which hold the same piece, stand on
different ranks: a rank has one copy of a piece, and `SyncTied` adds up those of several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintsched.ir.plan_data import PlanData


def piece_faults(plan: PlanData) -> Iterator[str]:
    """Yield what is wrong with the piece of the model that each stage holds, and with the order of each route."""
    stages = len(plan.stage_to_pp)
    pieces = tuple(range(stages)) if plan.stage_to_part is None else plan.stage_to_part
    if len(pieces) != stages:
        yield f"stage_to_part names {len(pieces)} stages, but there are {stages}"
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
                f"{place[1]}; twins stand on different ranks"
            )
