"""Orders written as phases: repeated sequences of turns, whose microbatches are numbered by counting.

    F0 F0 F1 I1 W F1 …   ──number──▶   F0 of microbatch 0, F0 of 1, F1 of 0, I1 of 0, its W, F1 of 1, …

A rank has two lanes, 0 and 1: two chunks of a V, or its stages in two copies of a model that run in opposite
directions. A turn may be a pair, a forward and a backward that overlap; if one of them is dropped, the other runs
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd, Overlap
from quintsched.schedules.kit.registry import Order


class Turn(Enum):
    """Turn of a rank: forward, input half or whole backward of a lane, or the oldest pending weight half."""

    F0 = auto()
    F1 = auto()
    I0 = auto()
    I1 = auto()
    B0 = auto()
    B1 = auto()
    W = auto()


TURN_COMPUTES: dict[Turn, tuple[type[Compute], int]] = {
    Turn.F0: (Fwd, 0),
    Turn.F1: (Fwd, 1),
    Turn.I0: (BwdInput, 0),
    Turn.I1: (BwdInput, 1),
    Turn.B0: (Bwd, 0),
    Turn.B1: (Bwd, 1),
}
"""Instruction and lane of each turn but `W`."""


@dataclass(frozen=True)
class StageLane:
    """Stage, with the microbatches that visit it in order."""

    stage: int
    microbatches: range


@dataclass(frozen=True)
class Both:
    """Forward and backward of different lanes, side by side."""

    forward: Turn
    backward: Turn


Phase = tuple[tuple[Turn | Both, ...], int]
"""Sequence of turns, and how often it is repeated."""


def number(phases: Iterable[Phase], lanes: tuple[StageLane, StageLane]) -> Order:
    """Yield the turns with their microbatches; turns beyond a lane's microbatches are dropped.

    So phases can be written for enough microbatches to fill the pipeline: without the later ones, the order still
    runs. Dropped turns are skipped in bulk, not one by one.
    """
    count = _Count(lanes)
    for turns, times in phases:
        walked = min(times, count.left(turns))
        for turn in turns * walked:
            if isinstance(turn, Both):
                yield from _side_by_side(count.take_turn(turn.forward), count.take_turn(turn.backward))
            elif (found := count.take_turn(turn)) is not None:
                yield found
        if times > walked:
            yield from count.skip(turns, times - walked)


def _side_by_side(forward: Compute | None, backward: Compute | None) -> Order:
    if forward is not None and backward is not None:
        return [Overlap((forward.stage, forward.microbatch), (backward.stage, backward.microbatch))]
    return [found for found in (forward, backward) if found is not None]


class _Count:
    """Progress of both lanes, and the pending weight halves."""

    def __init__(self, lanes: tuple[StageLane, StageLane]) -> None:
        self._lanes = lanes
        self._ends = [len(lane.microbatches) for lane in lanes]
        self._done: dict[type[Compute], list[int]] = {Fwd: [0, 0], BwdInput: [0, 0]}
        self._done[Bwd] = self._done[BwdInput]
        self._pending: deque[tuple[int, int, int]] = deque()  # runs: (lane, first, length); length 1 within the lane

    def left(self, turns: Sequence[Turn | Both]) -> int:
        """Return how often these turns must be repeated until all of them are beyond their lanes."""
        return max([0, *(self._ends[lane] - self._done[kind][lane] for kind, lane in _counted(turns))])

    def take_turn(self, turn: Turn) -> Compute | None:
        """Return the computation of a turn; None if it is beyond the lane's microbatches."""
        if turn is Turn.W:
            kind: type[Compute] = BwdWeight
            lane, k, length = self._pending.popleft()
            if length > 1:
                self._pending.appendleft((lane, k + 1, length - 1))
        else:
            kind, lane = TURN_COMPUTES[turn]
            k = self._done[kind][lane]
            self._done[kind][lane] += 1
        if kind is BwdInput:
            self._pending.append((lane, k, 1))
        return self._named(kind, lane, k)

    def skip(self, turns: Sequence[Turn | Both], times: int) -> Order:
        """Skip turns that are beyond their lanes; yield the weight halves among them that are not."""
        for kind, lane in _counted(turns):
            if kind is BwdInput:
                self._pending.append((lane, self._done[kind][lane], times))
            self._done[kind][lane] += times
        for lane, k in _popped(self._pending, turns.count(Turn.W) * times):
            found = self._named(BwdWeight, lane, k)
            if found is not None:
                yield found

    def _named(self, kind: type[Compute], lane: int, k: int) -> Compute | None:
        if k >= self._ends[lane]:
            return None
        return kind(self._lanes[lane].stage, self._lanes[lane].microbatches[k])


def _counted(turns: Sequence[Turn | Both]) -> list[tuple[type[Compute], int]]:
    """Return the turns that count microbatches themselves: all but weight halves."""
    single = (t for turn in turns for t in ((turn.forward, turn.backward) if isinstance(turn, Both) else (turn,)))
    return [TURN_COMPUTES[turn] for turn in single if turn is not Turn.W]


def _popped(pending: deque[tuple[int, int, int]], number: int) -> Iterator[tuple[int, int]]:
    """Take `number` entries off the runs; yield the first of each run."""
    while number > 0:
        lane, k, length = pending.popleft()
        if length > number:
            pending.appendleft((lane, k + number, length - number))
        number -= length
        yield lane, k


def windows(length: int, *starts: int) -> Iterator[int]:
    """Yield each integer less than `length` after one of `starts`, in ascending order, once."""
    end = 0
    for start in sorted(starts):
        yield from range(max(start, end), start + length)
        end = max(end, start + length)
