"""Interleaving of overlapped forwards and backwards: measured in the second step, interleaved from then on.

    step 0    Fwd alone, then Bwd alone
    step 1    likewise                           the waits inside each stage, and their durations, are recorded
              all holders of the stages agree    the same waits; the mean of the times
    step 2…   both, in the order of turns that takes the least time by these

    forward    ██ x ████ x █                     █ a computation, x a collective that takes some time
    backward   █ y ███ y ███
    turns      B F B F B F                       whichever starts first waits for its collective

So the order is fixed before anything overlaps, and is the same on all replicas. Where no communication can be hidden,
the two run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from quintsched.errors import MisfitError

from .host_collectives import reduce_numbers
from .overlap_threads import BoundCall, Note, Side, Sides
from .transport_interface import Group

Pair = tuple[int, int]
"""(stage of a forward, stage of the overlapped backward)."""

CHANGE_S = 50e-6
"""Cost of a switch between sides, in seconds: collectives as short as that are not worth one."""

MOST_KEPT = 8
"""Maximum number of partial schedules kept per state, where none dominates the others."""


class Overlaps:
    """The overlapped pairs of one rank's program, and their turns.

    Args:
        sides: the sides of the rank.
        device: the rank's device.

    Attributes:
        is_open: whether there are pairs whose turns are not settled yet.
    """

    def __init__(self, sides: Sides, device: torch.device) -> None:
        self._sides, self._device = sides, device
        self._notes: dict[tuple[Side, int], list[Note]] = {}
        self._turns: dict[Pair, Sequence[Side]] | None = None
        self._pairs: set[Pair] = set()
        self._is_warm = self.is_open = False

    def pair(self, forward: BoundCall, backward: BoundCall, stages: Pair) -> BoundCall:
        """Return a call that runs a forward and a backward, of these two stages, interleaved."""
        self._pairs.add(stages)
        self.is_open = self._turns is None

        def run() -> None:
            if self._turns is None:
                self._note(Side.FORWARD, stages[0], forward)
                self._note(Side.BACKWARD, stages[1], backward)
            elif self._turns[stages]:
                self._sides.run_sides(forward, backward, self._turns[stages], self._device)
            else:
                forward()
                backward()

        return run

    def end_step(self, holders: Group) -> str:
        """Return the waits of the sides, in words, when it is time to settle the turns; else "" (collective).

        That is after the second step, as the first one may contain one-time work, or the first step after it in which
        all pairs of all holders had samples. Raises `MisfitError` where microbatches differ.
        """
        is_early, self._is_warm = not self._is_warm, True
        sides = {(side, stages[side]) for stages in self._pairs for side in Side}
        if is_early or any(reduce_numbers(holders, [self._notes.keys() != sides])):
            self._notes.clear()
            return ""
        for (side, stage), notes in sorted(self._notes.items()):
            if any(note.waits != notes[0].waits for note in notes):
                times = [len(note.waits) for note in notes]
                raise MisfitError(
                    f"stage {stage}: its {side.name.lower()}s exchange {min(times)} to {max(times)} times from one "
                    "microbatch to another, so that no turns can be settled; compile the plan without overlap"
                )
        return str([(key, notes[0].waits) for key, notes in sorted(self._notes.items())])

    def settle_turns(self, holders: Group) -> None:
        """Settle the turns of each pair, after all holders of the stages have recorded the same waits (collective)."""
        of_side = {key: self._mean_seconds(key, holders) for key in sorted(self._notes)}
        self._turns = {
            pair: interleaving(of_side[Side.FORWARD, pair[0]], of_side[Side.BACKWARD, pair[1]])
            for pair in sorted(self._pairs)
        }
        self._notes.clear()
        self.is_open = False

    def _note(self, side: Side, stage: int, call: BoundCall) -> None:
        self._notes.setdefault((side, stage), []).append(self._sides.record_side(side, call, self._device))

    def _mean_seconds(self, key: tuple[Side, int], holders: Group) -> list[float]:
        """Return the duration of each stretch of a side: its minimum on each rank, averaged over all holders."""
        shortest = [min(times) for times in zip(*(note.seconds() for note in self._notes[key]), strict=True)]
        total = torch.tensor(shortest, dtype=torch.float64, device=self._device)
        holders.all_reduce(total).wait()
        found: list[float] = (total / holders.size).tolist()
        return found


class _PartialSchedule(NamedTuple):
    """A partial schedule: time, end of each side's collective, side that ran last, and schedule before that."""

    now: float
    done: tuple[float, float]
    side: Side
    before: _PartialSchedule | None

    def is_better(self, other: _PartialSchedule) -> bool:
        """Whether it dominates another one: as early in every respect, without a switch of sides."""
        alike = self.side is other.side and self.done[0] <= other.done[0] and self.done[1] <= other.done[1]
        return alike and self.now <= other.now

    def turns(self) -> tuple[Side, ...]:
        """Return the sides that ran, from the beginning on."""
        found: list[Side] = []
        way: _PartialSchedule | None = self
        while way is not None and way.before is not None:
            found.append(way.side)
            way = way.before
        return tuple(reversed(found))


def interleaving(forward: Sequence[float], backward: Sequence[float]) -> tuple[Side, ...]:
    """Return the turns of two sides that take the least time together; () to run one after the other.

    Each side is given as the seconds of its first computation, first collective, second computation, …, last
    computation. Collectives overlap with everything else, and a switch of sides takes time. The result is
    deterministic.
    """
    computed, exchanged = (forward[::2], backward[::2]), (forward[1::2], backward[1::2])
    if not any(exchanged):
        return ()
    ways: dict[tuple[int, int], list[_PartialSchedule]] = {
        (0, 0): [_PartialSchedule(0.0, (0.0, 0.0), Side.FORWARD, None)]
    }
    for _ in range(len(computed[0]) + len(computed[1])):
        following: dict[tuple[int, int], list[_PartialSchedule]] = {}
        for place, kept in ways.items():
            for side in Side:
                if place[side] < len(computed[side]):
                    there = (place[0] + (side is Side.FORWARD), place[1] + (side is Side.BACKWARD))
                    exchange = (*exchanged[side], 0.0)[place[side]]
                    moved = (_after(way, side, computed[side][place[side]], exchange) for way in kept)
                    following.setdefault(there, []).extend(moved)
        ways = {place: _best(found) for place, found in following.items()}
    (last,) = ways.values()
    turns = min(last, key=lambda way: way.now).turns()
    changes = sum(one is not other for one, other in pairwise(turns))
    return turns if changes > 1 else ()


def _after(way: _PartialSchedule, side: Side, computation: float, exchange: float) -> _PartialSchedule:
    """Return the schedule extended by one computation of a side, after a wait for its own collective."""
    change = CHANGE_S if way.before is not None and side is not way.side else 0.0
    now = max(way.now, way.done[side]) + change + computation
    done = (now + exchange, way.done[1]) if side is Side.FORWARD else (way.done[0], now + exchange)
    return _PartialSchedule(now, done, side, way)


def _best(ways: Iterable[_PartialSchedule]) -> list[_PartialSchedule]:
    """Return the schedules that no other dominates, the earliest ones of them."""
    kept: list[_PartialSchedule] = []
    for way in sorted(ways, key=lambda way: way[:3]):
        if not any(other.is_better(way) for other in kept):
            kept.append(way)
    return kept[:MOST_KEPT]
