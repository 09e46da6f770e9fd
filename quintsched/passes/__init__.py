"""The passes that turn a schedule's compute order into a whole plan, read from top to bottom.

    order of computation ─▶ place_messages ─▶ sync_twins ─▶ reduce_buckets
                         ─▶ share_metrics ─▶ clip_gradients ─▶ step_optimizer

Each is a pure function Plan → Plan. `Pass.establishes` names the points of a sound plan that hold from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintsched.passes.finish import clip_gradients, share_metrics, step_optimizer
from quintsched.passes.messages import place_messages
from quintsched.passes.reductions import reduce_buckets, sync_twins
from quintsched.plan import Plan


@dataclass(frozen=True)
class Pass:
    """A named pure function Plan → Plan, and the points of a sound plan that hold after it."""

    name: str
    apply: Callable[[Plan], Plan]
    establishes: tuple[str, ...]


TRAIN_PASSES = (
    Pass("place-messages", place_messages, ("complete", "channels", "deadlock")),
    Pass("sync-twins", sync_twins, ()),
    Pass("reduce-buckets", reduce_buckets, ()),
    Pass("share-metrics", share_metrics, ("collectives",)),
    Pass("clip-gradients", clip_gradients, ()),
    Pass("step-optimizer", step_optimizer, ("data flow",)),
)

FORWARD_PASSES = (
    Pass("place-messages", place_messages, ("complete", "channels", "deadlock")),
    Pass("share-metrics", share_metrics, ("collectives", "data flow")),
)

__all__ = ["FORWARD_PASSES", "TRAIN_PASSES", "Pass"]
