"""Orders that are written as phases: what is done in turn, the microbatches numbered by counting.

    F0 F0 F1 I1 W F1 …   ──number──▶   F0 of microbatch 0, F0 of 1, F1 of 0, I1 of 0, its W, F1 of 1, …

A rank has two lanes, 0 and 1: two chunks of a V, or its stages of two models that run against each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from quintsched.ir.instructions import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.schedules.kit.registry import Order


class Turn(Enum):
    """What a rank does next: forward, input half or whole backward of a lane, or the oldest pending weight half."""

    F0 = auto()
    F1 = auto()
    I0 = auto()
    I1 = auto()
    B0 = auto()
    B1 = auto()
    W = auto()


KINDS: dict[Turn, tuple[type[Compute], int]] = {
    Turn.F0: (Fwd, 0),
    Turn.F1: (Fwd, 1),
    Turn.I0: (BwdInput, 0),
    Turn.I1: (BwdInput, 1),
    Turn.B0: (Bwd, 0),
    Turn.B1: (Bwd, 1),
}
"""The instruction and the lane of each turn but `W`."""


@dataclass(frozen=True)
class Lane:
    """A stage, and the microbatches that visit it in turn."""

    stage: int
    microbatches: range


def number(turns: Iterable[Turn], lanes: tuple[Lane, Lane]) -> Order:
    """Yield the turns with their microbatches; turns beyond a lane's microbatches fall away.

    Phases can so be written for as many microbatches as fill the pipeline: what is left when the later ones are
    taken out is in an order that still runs.
    """
    forwards, backwards = [0, 0], [0, 0]
    pending: deque[tuple[int, int]] = deque()
    for turn in turns:
        if turn is Turn.W:
            kind: type[Compute] = BwdWeight
            lane, k = pending.popleft()
        else:
            kind, lane = KINDS[turn]
            count = forwards if kind is Fwd else backwards
            k = count[lane]
            count[lane] += 1
        if kind is BwdInput:
            pending.append((lane, k))
        if k < len(lanes[lane].microbatches):
            yield kind(lanes[lane].stage, lanes[lane].microbatches[k])
