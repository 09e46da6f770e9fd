"""Partition of blocks into contiguous stages that minimizes the cost of the slowest stage."""

from __future__ import annotations

from collections.abc import Sequence

from quintsched.errors import MisfitError, counted


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Return `stages` non-empty ranges of blocks, with the exact minimum of the largest sum of costs.

    Among the optimal cuts, earlier stages take as many blocks as they can. Dynamic programming over
    (stages, blocks), O(stages x blocks²) at worst; costs are not negative.
    Raises `MisfitError` where there are fewer blocks than stages.
    """
    if len(costs) < stages:
        raise MisfitError(
            f"{counted(len(costs), 'block')} cannot fill {counted(stages, 'stage')}; use fewer stages (pp x chunks) or "
            "more blocks"
        )
    limit = _smallest_limit(costs, stages)
    cuts, first = [], 0
    for stage in range(stages):
        last, total = first, 0.0
        spare = len(costs) - (stages - stage - 1)
        while last < spare and (last == first or total + costs[last] <= limit):
            total += costs[last]
            last += 1
        cuts.append(range(first, last))
        first = last
    return cuts


def _smallest_limit(costs: Sequence[float], stages: int) -> float:
    """Return the minimum over all cuts of the largest sum, summing each stage from its first block on."""
    num_blocks = len(costs)
    best = [0.0] + [float("inf")] * num_blocks
    for _ in range(stages):
        following = [float("inf")] * (num_blocks + 1)
        for first in range(num_blocks):
            total = 0.0
            for last in range(first, num_blocks):
                total += costs[last]
                following[last + 1] = min(following[last + 1], max(best[first], total))
        best = following
    return best[num_blocks]
