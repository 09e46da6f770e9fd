"""Figures of a step (loss, weight, metrics) piggybacked on its last gradient all-reduce, without an own collective.

    flat buffer of a bucket   [   p2   ][ p1 ][    p0    ]│ room ]      one all-reduce for both
    a figure (float64)        in float32: high + middle + low

Three numbers of 24 significant bits hold the 53 of a float64. Each replica adds its figures in the same places, part by
part: the total of several replicas is rounded as a sum in float32 is.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOM = 192
"""Maximum number of figures: loss, weight and metrics of a few dozen microbatches."""


class Room:
    """The space for figures behind the gradients in a flat buffer; `memory` is `room_for` numbers of its dtype."""

    def __init__(self, memory: Tensor) -> None:
        self._rows = memory.view(-1, ROOM).zero_()

    def write_figures(self, figures: Tensor) -> None:
        """Write figures (n,), float64, to be summed by the all-reduce; n is at most `ROOM`."""
        self._rows.zero_()
        rest = figures
        for row in self._rows[:, : len(figures)].unbind():
            row.copy_(rest)
            rest = (rest - row).nan_to_num_(0.0, torch.inf, -torch.inf)  # of what is infinite, nothing is left

    def read_figures(self, count: int) -> Tensor:
        """Return the sums of the first `count` figures, (count,), float64."""
        sums: Tensor = self._rows[:, :count].to(torch.float64).sum(0)
        return sums


def room_for(dtype: torch.dtype) -> int:
    """Return the size of the room in numbers of a dtype; 0 where a dtype is not supported."""
    return {torch.float32: 3 * ROOM, torch.float64: ROOM}.get(dtype, 0)
