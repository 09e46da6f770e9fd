"""Orders that are written as phases: what is done in turn, the microbatches numbered by counting.

    F0 F0 F1 I1 W F1 …   ──number──▶   F0 of microbatch 0, F0 of 1, F1 of 0, I1 of 0, its W, F1 of 1, …

A rank has two lanes, 0 and 1: two chunks of a V, or its stages of two models that run against each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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


Phase = tuple[tuple[Turn, ...], int]
"""Turns that are done one after the other, and how often these are repeated."""


def number(phases: Iterable[Phase], lanes: tuple[Lane, Lane]) -> Order:
    """Yield the turns with their microbatches; turns beyond a lane's microbatches fall away.

    Phases can so be written for as many microbatches as fill the pipeline: what is left when the later ones are
    taken out is in an order that still runs. What falls away is skipped, not walked through turn by turn.
    """
    ends = [len(lane.microbatches) for lane in lanes]
    done = {Fwd: [0, 0], BwdInput: [0, 0]}
    done[Bwd] = done[BwdInput]
    pending: deque[tuple[int, int, int]] = deque()  # runs of weight halves: lane, first, length (1: not beyond)
    for turns, times in phases:
        walked = min(times, max([0, *(ends[lane] - done[kind][lane] for kind, lane in _counted(turns))]))
        for turn in turns * walked:
            if turn is Turn.W:
                kind: type[Compute] = BwdWeight
                lane, k, length = pending.popleft()
                if length > 1:
                    pending.appendleft((lane, k + 1, length - 1))
            else:
                kind, lane = KINDS[turn]
                k = done[kind][lane]
                done[kind][lane] += 1
            if kind is BwdInput:
                pending.append((lane, k, 1))
            if k < ends[lane]:
                yield kind(lanes[lane].stage, lanes[lane].microbatches[k])
        skipped = times - walked
        for kind, lane in _counted(turns) if skipped else ():
            if kind is BwdInput:
                pending.append((lane, done[kind][lane], skipped))
            done[kind][lane] += skipped
        for lane, k in _popped(pending, turns.count(Turn.W) * skipped):
            if k < ends[lane]:
                yield BwdWeight(lanes[lane].stage, lanes[lane].microbatches[k])


def _counted(turns: tuple[Turn, ...]) -> list[tuple[type[Compute], int]]:
    """Return the turns that have a microbatch of their own: all but weight halves."""
    return [KINDS[turn] for turn in turns if turn is not Turn.W]


def _popped(pending: deque[tuple[int, int, int]], number: int) -> Iterator[tuple[int, int]]:
    """Take so many off the runs, and yield the first of each run."""
    while number > 0:
        lane, k, length = pending.popleft()
        if length > number:
            pending.appendleft((lane, k + number, length - number))
        number -= length
        yield lane, k


def windows(length: int, *starts: int) -> Iterator[int]:
    """Yield every moment, in rising order and once, that lies less than `length` after one of `starts`."""
    end = 0
    for start in sorted(starts):
        yield from range(max(start, end), start + length)
        end = max(end, start + length)
