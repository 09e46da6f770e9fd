"""Exact bytes of weights, gradients and optimizer state on one rank, under ZeRO 0 to 3.

With n elements, R replicas that shard them, and shards of ⌈n/R⌉ (Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054)

    ZeRO   weights               gradients             optimizer           16-bit: 2 for weights, 4 for gradients,
    0      n                     n                     n                   12 for masters and moments, 18 in all
    1      n                     n                     ⌈n/R⌉               32-bit: 4, 4 and 8
    2      n                     ⌈n/R⌉ + unit          ⌈n/R⌉
    3      ⌈n/R⌉ + units         ⌈n/R⌉ + unit          ⌈n/R⌉               unit: gathered or reduced at once

Dense weights have dp · cp · ep replicas, experts dp · cp. A unit is a block, as in FSDP, with the next one prefetched;
this project's runtime gathers a stage, in aligned buckets. Sizes may be arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quintsched.strategies.descriptions.parameters import Held

SHARDED_FROM = {"weights": 3, "gradients": 2, "optimizer": 1}
"""ZeRO stage from which on each kind is sharded."""

AHEAD = 2
"""Number of ZeRO-3 units that are full at once: the current one and the prefetched one."""


def state_bytes(
    held: Held,
    unit: Held,
    element: Any,
    *,
    zero: Any,
    replicas: Any,
    expert_replicas: Any,
    gradient: Any = None,
    pending: Any = 0,
) -> dict[str, Any]:
    """Return the bytes of a rank's state by kind: weights, gradients, optimizer, gathered.

    Args:
        held: elements that the rank would hold without ZeRO.
        unit: elements that are gathered, or reduced, at once.
        element: bytes of an element of a weight; below 4 the optimizer has masters besides Adam's two moments.
        zero: the stage of ZeRO.
        replicas: number of ranks with the same dense weights.
        expert_replicas: number of ranks with the same experts.
        gradient: bytes of an element of a gradient; None: 4 at least (as in Megatron; DeepSpeed has 2).
        pending: fraction of the full gradients that is held beside the shards, where those of several microbatches are
            added up before they are reduced; 0: of one unit, as those of each microbatch are reduced.
    """
    sharded = {kind: np.asarray(zero) >= stage for kind, stage in SHARDED_FROM.items()}
    full = held.dense + held.experts
    shard = np.ceil(held.dense / replicas) + np.ceil(held.experts / expert_replicas)
    at_once = unit.dense * (np.asarray(replicas) > 1) + unit.experts * (np.asarray(expert_replicas) > 1)
    gathered = element * sharded["weights"] * np.minimum(AHEAD * at_once, full)
    wide = np.maximum(element, 4)
    gradient = wide if gradient is None else gradient
    masters = np.where(np.asarray(element) < 4, 4, 0)
    each = {"weights": element, "gradients": gradient, "optimizer": masters + 2 * wide}
    state = {kind: bytes_ * ~sharded[kind] * full + bytes_ * sharded[kind] * shard for kind, bytes_ in each.items()}
    state["gradients"] = state["gradients"] + gradient * sharded["gradients"] * pending * full
    return state | {
        "gathered": gathered + gradient * sharded["gradients"] * np.where(np.asarray(pending) > 0, 0.0, at_once)
    }
