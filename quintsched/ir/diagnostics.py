"""What the checker finds wrong: which point of soundness, where, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Point(Enum):
    """What a finding offends against (the points of a sound plan)."""

    WELL_FORMED = "well-formed"
    COMPLETE = "complete"
    DATA_FLOW = "data flow"
    CHANNELS = "channels"
    DEADLOCK = "deadlock"
    COLLECTIVES = "collectives"
    MEMORY = "memory"


@dataclass(frozen=True)
class Finding:
    """One fault, in words that hold the place; `rank` is a pp rank, `index` counts in its program."""

    point: Point
    message: str
    rank: int | None = None
    index: int | None = None
