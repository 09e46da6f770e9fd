"""Figures of a step that ride along with its last gradients, so that no collective is spent on them.

    flat buffer of a bucket   [   p2   ][ p1 ][    p0    ]│ room ]      one all-reduce for both
    a figure (float64)        in float32: high + middle + low

Each figure has its own place in the room, where every other rank has zero. So it is not rounded when it is added up in
a short type: three numbers of 24 bits hold the 53 of a float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOM = 192
"""How many figures find room: loss, weight and metrics of a few dozen microbatches."""


class Room:
    """What lies behind the gradients in a flat buffer; `memory` is `room_for` numbers of its type."""

    def __init__(self, memory: Tensor) -> None:
        self._rows = memory.view(-1, ROOM).zero_()

    def board(self, figures: Tensor) -> None:
        """Let figures (n), float64, be added up; n is at most `ROOM`."""
        self._rows.zero_()
        rest = figures
        for row in self._rows[:, : len(figures)]:
            row.copy_(rest)
            rest = torch.where(figures.isfinite(), rest - row, 0.0)

    def alight(self, count: int) -> Tensor:
        """Return the sums of that many figures, (count), float64."""
        sums: Tensor = self._rows[:, :count].to(torch.float64).sum(0)
        return sums


def room_for(dtype: torch.dtype) -> int:
    """Return how many numbers of a type the room takes; 0 where figures cannot ride in it."""
    return {torch.float32: 3 * ROOM, torch.float64: ROOM}.get(dtype, 0)
