"""How the overlapping computations of one rank run: noted in the second step, side by side from then on.

    step 0    Fwd alone, then Bwd alone
    step 1    likewise                           what each waited for inside its stage, and for how long, is noted
              all holders of the stages agree    the same waits; of the times, the mean
    step 2…   both, in the turns that take least time by these

    forward    ██ x ████ x █                     █ a computation, x an exchange that takes some time
    backward   █ y ███ y ███
    turns      B F B F B F                       whoever goes on first waits for its exchange

So the order is settled before anything overlaps, and is the same on all replicas. Where nothing can be hidden, the two
run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from quintsched.errors import MisfitError

from .base import Group
from .sides import Note, Side, Sides

Call = Callable[[], None]
Pair = tuple[int, int]
"""The stage of a forward, and that of the backward beside it."""

CHANGE_S = 50e-6
"""What it takes to let the other side go on, in seconds: exchanges that are as short are not worth it."""

MOST_KEPT = 8
"""How many ways to the same place are looked at further, where none is better in every respect."""


class Overlaps:
    """The pairs of one rank's program.

    Args:
        sides: the rank's.
        device: where it computes.

    Attributes:
        is_open: whether there are pairs whose turns are not settled yet.
    """

    def __init__(self, sides: Sides, device: torch.device) -> None:
        self._sides, self._device = sides, device
        self._notes: dict[tuple[Side, int], list[Note]] = {}
        self._turns: dict[Pair, Sequence[Side]] | None = None
        self._pairs: set[Pair] = set()
        self._is_warm = self.is_open = False

    def pair(self, forward: Call, backward: Call, stages: Pair) -> Call:
        """Return what runs a forward and a backward, of these two stages, side by side."""
        self._pairs.add(stages)
        self.is_open = self._turns is None

        def run() -> None:
            if self._turns is None:
                self._note(Side.FORWARD, stages[0], forward)
                self._note(Side.BACKWARD, stages[1], backward)
            elif self._turns[stages]:
                self._sides.run(forward, backward, self._turns[stages], self._device)
            else:
                forward()
                backward()

        return run

    def end_step(self) -> str | None:
        """Return what the sides waited for, in words, when it is time to settle the turns; else None.

        That is after the second step: in the first one layers may do what they never do again. Raises `MisfitError`
        where microbatches differ.
        """
        if not self._is_warm:
            self._is_warm = True
            self._notes.clear()
            return None
        for (side, stage), notes in sorted(self._notes.items()):
            if any(note.waits != notes[0].waits for note in notes):
                times = [len(note.waits) for note in notes]
                raise MisfitError(
                    f"stage {stage}: its {side.name.lower()}s exchange {min(times)} to {max(times)} times from one "
                    "microbatch to another, so that no turns can be settled; compile the plan without overlap"
                )
        return str([(key, notes[0].waits) for key, notes in sorted(self._notes.items())])

    def settle(self, holders: Group) -> None:
        """Settle in which turns each pair runs, after all holders of the stages have noted the same (collective)."""
        of_side = {key: self._mean_seconds(key, holders) for key in sorted(self._notes)}
        self._turns = {
            pair: interleaving(of_side[Side.FORWARD, pair[0]], of_side[Side.BACKWARD, pair[1]])
            for pair in sorted(self._pairs)
        }
        self._notes.clear()
        self.is_open = False

    def _note(self, side: Side, stage: int, call: Call) -> None:
        self._notes.setdefault((side, stage), []).append(self._sides.note(side, call, self._device))

    def _mean_seconds(self, key: tuple[Side, int], holders: Group) -> list[float]:
        """Return what each stretch of a side takes: its shortest time here, and of that the mean over all holders."""
        shortest = [min(times) for times in zip(*(note.seconds() for note in self._notes[key]), strict=True)]
        total = torch.tensor(shortest, dtype=torch.float64, device=self._device)
        holders.all_reduce(total).wait()
        found: list[float] = (total / holders.size).tolist()
        return found


class _Way(NamedTuple):
    """How far two sides can have come: what time it is, when the exchange of each is done, who ran last, and before."""

    now: float
    done: tuple[float, float]
    side: Side
    before: _Way | None

    def is_better(self, other: _Way) -> bool:
        """Whether it is as early in every respect, and nobody has to change sides."""
        alike = self.side is other.side and self.done[0] <= other.done[0] and self.done[1] <= other.done[1]
        return alike and self.now <= other.now

    def turns(self) -> tuple[Side, ...]:
        """Return who ran, from the beginning on."""
        found: list[Side] = []
        way: _Way | None = self
        while way is not None and way.before is not None:
            found.append(way.side)
            way = way.before
        return tuple(reversed(found))


def interleaving(forward: Sequence[float], backward: Sequence[float]) -> tuple[Side, ...]:
    """Return the turns of two sides that take least time together; () where that is one after the other.

    Each side is given as the seconds of its first computation, first exchange, second computation, …, last computation.
    Exchanges take their time beside everything else, and to change sides takes some too. The same numbers give the same
    turns.
    """
    computed, exchanged = (forward[::2], backward[::2]), (forward[1::2], backward[1::2])
    if not any(exchanged):
        return ()
    ways: dict[tuple[int, int], list[_Way]] = {(0, 0): [_Way(0.0, (0.0, 0.0), Side.FORWARD, None)]}
    for _ in range(len(computed[0]) + len(computed[1])):
        following: dict[tuple[int, int], list[_Way]] = {}
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


def _after(way: _Way, side: Side, computation: float, exchange: float) -> _Way:
    """Return the way on which a side runs next, waiting for its own exchange first."""
    change = CHANGE_S if way.before is not None and side is not way.side else 0.0
    now = max(way.now, way.done[side]) + change + computation
    done = (now + exchange, way.done[1]) if side is Side.FORWARD else (way.done[0], now + exchange)
    return _Way(now, done, side, way)


def _best(ways: Iterable[_Way]) -> list[_Way]:
    """Return the ways than which none is better, the earliest of them."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:3]):
        if not any(other.is_better(way) for other in kept):
            kept.append(way)
    return kept[:MOST_KEPT]
