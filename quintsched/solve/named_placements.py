"""Placements that are searched, by name, and the costs of their stages.

linear, loop, v    a model's stages, each on one rank
bidirectional      two copies of as many stages as ranks, in opposite directions, each for half of the microbatches
"""

from __future__ import annotations

from collections.abc import Sequence

from quintsched.errors import UsageError, counted, suggest
from quintsched.schedules.kit.registry import Placement
from quintsched.schedules.kit.stage_placements import bidirectional, linear, loop, v
from quintsched.simulation.cost_forms import PerStage
from quintsched.simulation.costs import TAKEN_AS_IT_IS, Costs

PLACEMENTS: dict[str, Placement] = {"linear": linear, "loop": loop, "v": v, "bidirectional": bidirectional}
"""Placements by name, as functions of pp and chunks."""
AUTO, WITH_CHUNKS = ("linear", "loop", "v"), ("loop", "v")
"""Placements of "auto", which hold each weight once, and those with any number of stages on each rank."""


def placements(name: str, chunks: int | None, pp: int, microbatches: int) -> dict[str, tuple[int, ...]]:
    """Return the rank of each stage under a placement, or under each of "auto", by name; raises `UsageError`."""
    if name != "auto" and name not in PLACEMENTS:
        raise UsageError(f"unknown placement {name!r}{suggest(name, [*PLACEMENTS, 'auto'])}")
    several = 2 if chunks is None else chunks
    require_positive(chunks=several)
    if name in PLACEMENTS and name not in WITH_CHUNKS and several > 1 and chunks is not None:
        raise UsageError(f"placement {name} has no chunks; leave chunks={chunks} out, or choose loop or v")
    if name == "bidirectional" and (pp % 2 or microbatches % 2):
        raise UsageError(
            f"placement bidirectional at pp={pp}, {counted(microbatches, 'microbatch')}: both have to be even, since "
            "half of the microbatches go each way, and no rank may hold both copies of a stage"
        )
    names: Sequence[str] = AUTO if name == "auto" else [name]
    found = {one: PLACEMENTS[one](pp, several if one in WITH_CHUNKS else 1) for one in names}
    return {one: placed for one, placed in found.items() if one == "linear" or len(found) == 1 or pp > 1}


def routes_of(name: str) -> int:
    """Return the number of routes of a placement."""
    return 2 if name == "bidirectional" else 1


def costs_for(name: str, costs: Costs, num_ranks: int, num_stages: int) -> Costs:
    """Return costs of a placement's stages, where lists are for one stage on each rank."""
    return _twice(costs, num_ranks) if routes_of(name) > 1 else cut_in_parts(costs, num_ranks, num_stages)


def cut_in_parts(costs: Costs, num_ranks: int, num_stages: int) -> Costs:
    """Return costs in which each stage of a list for `num_ranks` stages is cut in equal parts, `num_stages` in all."""
    parts = num_stages // num_ranks

    def cut(name: str, value: PerStage) -> PerStage:
        if not isinstance(value, tuple) or len(value) != num_ranks:
            return value
        share = 1 if name in TAKEN_AS_IT_IS else parts
        return tuple(one / share for one in value for _ in range(parts))

    return costs.with_stages(cut)


def _twice(costs: Costs, num_stages: int) -> Costs:
    """Return costs in which a list for `num_stages` stages is also that of their copies, which follow them."""
    return costs.with_stages(
        lambda name, value: value * 2 if isinstance(value, tuple) and len(value) == num_stages else value
    )


def require_positive(**values: int) -> None:
    """Raise `UsageError` for a value that is no whole number from 1 on."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value!r}; give a whole number from 1 on")
