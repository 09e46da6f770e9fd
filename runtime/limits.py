"""What the runtime can run of all the plans that are sound: said before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from quintsched.checker import require_runnable as require_free
from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from .blocks import Blocks, some_take
from .job import require_world
from .stages import Stage
from .transport import Transport


def require_runnable(plan: Plan, transport: Transport) -> None:
    """Raise `UsageError`, `MisfitError` or `UnsoundError` for a plan that this transport cannot run."""
    require_world(plan, transport.world_size)
    if plan.mesh.axis_size("cp") > 1 and plan.schedule.slices > 1:
        raise UsageError(
            f"mesh {plan.mesh} shares out each sequence over cp, and {plan.schedule.name} cuts it into "
            f"{plan.schedule.slices} slices; a run does one or the other"
        )
    require_free(plan, transport.profile)
    layout = plan.layout
    for route in plan.routes:
        parts = [layout.part_of(stage) for stage in route.stages]
        if parts != list(range(1 + max(map(layout.part_of, range(len(plan.stage_to_pp)))))):
            raise MisfitError(
                f"a route visits the pieces of the model in the order {parts}; to be run, each route must visit all of "
                "them in the model's order"
            )
    for stage in range(len(plan.stage_to_pp)):
        twins = layout.twins(stage)
        if len({plan.stage_to_pp[twin] for twin in twins}) < len(twins):
            raise MisfitError(f"the twins {twins} hold the same piece of the model on one rank; they need a rank each")


def require_long_sight(plan: Plan, blocks: Blocks) -> None:
    """Raise `MisfitError` where sequences are cut and no block can look beyond its piece."""
    pieces = {
        "past": (f"{plan.schedule.name} cuts sequences into {plan.schedule.slices} slices", plan.schedule.slices),
        "context": (f"mesh {plan.mesh} shares out sequences over cp", plan.mesh.axis_size("cp")),
    }
    for name, (what, count) in pieces.items():
        if count > 1 and not some_take(name, blocks):
            raise MisfitError(
                f"{what}, but no block takes `{name}` in its forward: an attention would see only its own piece"
            )


def require_repeatable(plan: Plan, stages: Mapping[int, Stage], transport: Transport) -> None:
    """Raise `MisfitError` where a recomputed forward would draw other random masks than the first one did.

    Ranks that are threads of one process draw from one generator.
    """
    if transport.name != "local" or transport.world_size == 1:
        return
    for number, stage in stages.items():
        if plan.layout.recomputes(number) and any(_drops(module) for module in stage.modules()):
            raise MisfitError(
                f"stage {number} drops out and is recomputed, and ranks in one process share a random generator; run "
                "it on processes of their own, or set its p to 0"
            )


def require_blocks_to_recompute(plan: Plan, stages: Mapping[int, Stage]) -> None:
    """Raise `MisfitError` where a stage has too few blocks for every k-th of them to be recomputed."""
    for number, stage in stages.items():
        every = plan.layout.recompute_every(number)
        if every > len(stage.blocks):
            raise MisfitError(
                f"one of {every} blocks of stage {number} is to be recomputed, but it has {len(stage.blocks)}; "
                f"set recompute to {len(stage.blocks)} at most, or to 1 for the whole stage"
            )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.p > 0
