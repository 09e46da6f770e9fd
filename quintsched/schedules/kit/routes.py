"""Routes of microbatches through the stages: one, two in opposite directions, or those that a schedule gives.

one              stages 0 1 2 3              all microbatches
bidirectional    stages 0 1 2 3, 4 5 6 7     half of them on each
its own          routes=lambda shape: [((0, 1, 2, 3), range(0, 2)), ((4, 5, 6, 7), range(2, 4)), …]

Every route visits the whole model, so a stage's position on its route is the piece of the model that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from quintsched.errors import UnsoundError, counted
from quintsched.ir.layout import Route, equal_routes
from quintsched.ir.mesh import whole_number
from quintsched.schedules.kit.registry import Schedule, Shape, own_code


def routes_of(schedule: Schedule, shape: Shape) -> tuple[Route, ...]:
    """Return the routes of a plan of this shape; raises `UnsoundError` if the schedule gives invalid ones."""
    stages, units = len(shape.stage_to_pp), shape.num_units
    if schedule.routes is None:
        return equal_routes(1 + schedule.bidirectional, stages, units)
    most = max(stages, units)
    with own_code(f"{schedule.name} at pp={shape.pp}, {counted(shape.microbatches, 'microbatch')}: its routes"):
        found = [[_numbers(part, most) for part in _first(one, 2)] for one in _first(schedule.routes(shape), most)]
    pairs = [pair for pair in found if len(pair) == 2 and None not in pair]
    if not pairs or len(pairs) != len(found):
        raise UnsoundError(
            f"{schedule.name}: its routes at pp={shape.pp}, {counted(shape.microbatches, 'microbatch')} are not pairs "
            "of stages and microbatches; give ((0, 1, …), (0, 1, …)) for each route"
        )
    return tuple(Route(stages or (), units or ()) for stages, units in pairs)


def parts_of(schedule: Schedule, shape: Shape, routes: tuple[Route, ...]) -> tuple[int, ...] | None:
    """Return the piece of the model that each stage holds, None if each holds its own; raises as `routes_of`."""
    stages = range(len(shape.stage_to_pp))
    if schedule.stage_to_part is None:
        places = {stage: part for route in routes for part, stage in enumerate(route.stages)}
        parts = tuple(places.get(stage, 0) for stage in stages)
        return None if parts == tuple(stages) else parts
    with own_code(f"{schedule.name} at pp={shape.pp}, {counted(shape.microbatches, 'microbatch')}: its stage_to_part"):
        given = _numbers(schedule.stage_to_part(shape), len(stages))
    if given is None:
        raise UnsoundError(
            f"{schedule.name}: its stage_to_part at pp={shape.pp} is not whole numbers; give a piece of the model, "
            "counted from 0, for each stage"
        )
    return given


def _first(found: object, most: int) -> list[object]:
    """Return the entries of an iterable, at most `most` + 1; [] if it is not iterable."""
    return [*islice(found, most + 1)] if isinstance(found, Iterable) else []


def _numbers(found: object, most: int) -> tuple[int, ...] | None:
    """Return integers from an iterable, at most `most` + 1; None if it holds anything else."""
    numbers = [whole_number(one) for one in _first(found, most)]
    known = tuple(number for number in numbers if number is not None)
    return known if isinstance(found, Iterable) and len(known) == len(numbers) else None
