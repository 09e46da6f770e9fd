"""What a picture of a spelled-out collective shows: a box on a rank's row while a chunk arrives there.

rank 0   [2][1][0][2]       the number is the chunk's; the colour says whether it is added to what is there, or stored
rank 1   [0][2][1][0]
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.collectives import CollectiveRun
from quintsched.ir.instructions import Compute

from .scene import Box, Scene


@dataclass(frozen=True, slots=True)
class Added(Compute):
    """A chunk (`microbatch`) arrives from a rank (`stage`) and is added to what is there."""


@dataclass(frozen=True, slots=True)
class Stored(Compute):
    """A chunk (`microbatch`) arrives from a rank (`stage`) and takes the place of what is there."""


def chunk_scene(run: CollectiveRun) -> Scene:
    """Sort the messages of a collective into what is drawn."""
    boxes = tuple(
        Box(to.rank, start, end, (Added if to.reduce else Stored)(to.peer, to.chunk), 0)
        for (_, to), start, end in zip(run.plan.messages, run.start, run.end, strict=True)
    )
    busy = [0.0] * run.plan.size
    for box in boxes:
        busy[box.rank] += box.end - box.start
    return Scene(run.plan.size, run.makespan, tuple(busy), boxes, arrows=(), marks=())
