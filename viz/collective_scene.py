"""Scene of a spelled-out collective: one box on a rank's row for each chunk that arrives there.

rank 0   [2][1][0][2]       the number is the chunk's; the colour tells whether it is added to the local one or stored
rank 1   [0][2][1][0]
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.collectives import CollectiveRun
from quintsched.ir.instruction_set import Compute

from .timeline_objects import ComputationBox, Scene


@dataclass(frozen=True, slots=True)
class Added(Compute):
    """Arrival of a chunk (`microbatch`) from a rank (`stage`), which is added to the local one."""


@dataclass(frozen=True, slots=True)
class Stored(Compute):
    """Arrival of a chunk (`microbatch`) from a rank (`stage`), which replaces the local one."""


def chunk_scene(run: CollectiveRun) -> Scene:
    """Return the scene of a collective's messages."""
    boxes = tuple(
        ComputationBox(to.rank, start, end, (Added if to.reduce else Stored)(to.peer, to.chunk), 0)
        for (_, to), start, end in zip(run.plan.messages, run.start, run.end, strict=True)
    )
    busy = [0.0] * run.plan.size
    for box in boxes:
        busy[box.rank] += box.end - box.start
    return Scene(run.plan.size, run.makespan, tuple(busy), boxes, arrows=(), marks=())
