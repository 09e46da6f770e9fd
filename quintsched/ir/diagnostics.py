"""Findings of the checker: the violated point of soundness, the place, and a message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Point(Enum):
    """Points of soundness that a finding can violate."""

    WELL_FORMED = "well-formed"
    COMPLETE = "complete"
    DATA_FLOW = "data flow"
    CHANNELS = "channels"
    DEADLOCK = "deadlock"
    COLLECTIVES = "collectives"
    MEMORY = "memory"


@dataclass(frozen=True)
class Finding:
    """One fault, with a message that names the place; `rank` is a pp rank, `index` a position in its program."""

    point: Point
    message: str
    rank: int | None = None
    index: int | None = None
