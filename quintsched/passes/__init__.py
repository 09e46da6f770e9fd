"""Passes that lower a schedule's order of computation to a whole plan, in this order.

    order of computation ─▶ place_recomputes ─▶ place_messages ─▶ gather_params ─▶ sync_tied ─▶ reduce_buckets
                         ─▶ share_metrics ─▶ clip_gradients ─▶ step_optimizer

Two more passes depend on other settings of the request, and come last: `place_offloads` and
`place_spelled_collectives`.

Each is a pure function from plan to plan. `Pass.establishes` lists the points of a sound plan that hold after it;
`lower` applies them all, and on request names the one that breaks a point. Imports `verify` and packages below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quintsched.errors import UnsoundError
from quintsched.ir.diagnostics import Point
from quintsched.ir.plan_data import PlanData
from quintsched.passes.place_messages import place_messages
from quintsched.passes.place_metric_exchange import clip_gradients, share_metrics
from quintsched.passes.place_optimizer_steps import step_optimizer
from quintsched.passes.place_recomputes import place_recomputes
from quintsched.passes.place_reductions import reduce_buckets
from quintsched.passes.place_tied_sums import sync_tied
from quintsched.passes.place_weight_gathers import gather_params
from quintsched.text.plan_listing import excerpt
from quintsched.verify.soundness import check

Watch = Callable[[str, PlanData], None]
"""Callback that gets the name of a pass and the plan after it."""


@dataclass(frozen=True)
class Pass:
    """Pass: a named pure function PlanData → PlanData, with the points of a sound plan that hold after it."""

    name: str
    apply: Callable[[PlanData], PlanData]
    establishes: tuple[Point, ...]


TRAIN_PASSES = (
    Pass("place-recomputes", place_recomputes, (Point.COMPLETE,)),
    Pass("place-messages", place_messages, (Point.COMPLETE, Point.CHANNELS, Point.DEADLOCK)),
    Pass("gather-params", gather_params, ()),
    Pass("sync-tied", sync_tied, ()),
    Pass("reduce-buckets", reduce_buckets, ()),
    Pass("share-metrics", share_metrics, (Point.COLLECTIVES,)),
    Pass("clip-gradients", clip_gradients, ()),
    Pass("step-optimizer", step_optimizer, (Point.DATA_FLOW,)),
)

FORWARD_PASSES = (
    Pass("place-messages", place_messages, (Point.COMPLETE, Point.CHANNELS, Point.DEADLOCK)),
    Pass("gather-params", gather_params, ()),
    Pass("share-metrics", share_metrics, (Point.COLLECTIVES, Point.DATA_FLOW)),
)


def lower(plan: PlanData, passes: Sequence[Pass], *, watch: Watch | None = None, verify: bool = False) -> PlanData:
    """Apply the passes in order; `watch` is called with each one's name and the plan after it.

    With `verify`, raises `UnsoundError` if a point established by a pass no longer holds after one of them.
    """
    established: tuple[Point, ...] = ()
    for step in passes:
        plan = step.apply(plan)
        established += step.establishes
        if watch:
            watch(step.name, plan)
        if verify:
            _refuse_broken(plan, step.name, established)
    return plan


def _refuse_broken(plan: PlanData, name: str, established: Sequence[Point]) -> None:
    owed = (Point.WELL_FORMED, *established)
    broken = [finding for finding in check(plan, profile="blocking").findings if finding.point in owed]
    if broken:
        first = next((finding for finding in broken if finding.index is not None), broken[0])
        places = [(f.rank, f.index) for f in (first,) if f.rank is not None and f.index is not None]
        head = f"not sound: {plan.title}\nthe pass {name!r} breaks the point {first.point.value!r}: {first.message}"
        raise UnsoundError("\n".join([head, *excerpt(plan, places)]))


__all__ = ["FORWARD_PASSES", "TRAIN_PASSES", "Pass", "Watch", "lower"]
