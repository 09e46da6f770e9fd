"""How long a run may stand still before it counts as stalled: learnt from how long it stood still while it went well.

    gaps       ─┐ the longest time in which no rank moved, of each of the last steps        0.02 s  0.03 s  4.8 s  …
    limit       └▶ max(10 s, 4 × the longest but one): a five second pause never ends a run, and is no rule

    setup, data, save, load, idle; a first step      the timeout of the run's waits, which would end them anyway
    a rank that is stopped                           the limit of a step, wherever it is

A run stalls when no rank moves *and somebody waits*: ranks that all load, or all save, are waited for by nobody. The
clock is what the hub saw: while it did not run itself (a machine put to sleep), no time passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quintsched.stalls.states import Phase

from .cell import NOTHING, UNKNOWN, Place

FLOOR_S = 10.0
"""No shorter stand is a stall, unless a limit is given."""
COMPILING_FLOOR_S = 300.0
"""The same where stages are compiled, which may happen anew in any step."""
FACTOR = 4.0
"""How much longer than the longest of the last steps' stands one has to be."""
REMEMBERED = 32
"""Of so many steps."""
FIRST_STEPS = 1
"""So many steps of a program are its first: what they warm up takes longer."""
TICK_S = 1.0
"""The most time that passes from one look to the next."""

FIRST_S = 60.0
"""How long a first step may stand still where a shorter limit is given."""

WALKS: tuple[Phase, ...] = ("step", "evaluate")
"""The phases in which ranks run programs, and wait for each other."""


@dataclass(frozen=True)
class Patience:
    """How long a run may stand still, in seconds.

    `timeout_s` is that of its waits; `stall_after` the limit of a step, None: learnt. `compiles` says whether stages
    are compiled.
    """

    timeout_s: float = 300.0
    stall_after: float | None = None
    compiles: bool = False

    @property
    def floor_s(self) -> float:
        """The least that a learnt limit is."""
        return COMPILING_FLOOR_S if self.compiles else FLOOR_S


@dataclass
class _Walk:
    """What is known of the steps of one program, or of its evaluations."""

    num_ended: int = 0
    gap_s: float = 0.0
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def usual_s(self) -> float:
        """The longest gap but one: one pause says nothing of the next step."""
        return sorted(self.gaps_s)[-2:][0]

    def end(self) -> None:
        self.num_ended += 1
        if self.num_ended > FIRST_STEPS:
            self.gaps_s.append(self.gap_s)
        self.gap_s = 0.0


class Progress:
    """Watches the places of all ranks.

    Attributes:
        still_s: how long no rank has moved.
    """

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.still_s = 0.0
        self._seen_s: float | None = None
        self._places: dict[int, Place] = {}
        self._walks: dict[tuple[Phase, int], _Walk] = {}

    def look(self, now_s: float, places: Mapping[int, Place]) -> bool:
        """Take in where ranks are at a time; return whether one of them has moved since the last look."""
        elapsed = 0.0 if self._seen_s is None else min(max(now_s - self._seen_s, 0.0), TICK_S)
        self._seen_s = now_s
        self.still_s += elapsed
        moved = [rank for rank, place in places.items() if self._places.get(rank) != place]
        if not moved:
            return False
        self._learn(self._places.values())
        first = min(self._places, default=-1)
        if first in moved:
            before = self._places[first]
            if before.phase in WALKS and before.entered != places[first].entered:
                self._walks.setdefault(_walk_of(before), _Walk()).end()
        self.still_s = 0.0
        self._places = dict(places)
        return True

    def _learn(self, places: Collection[Place]) -> None:
        """Count the time up to now as a gap of the walks that ranks were in, if all were in one."""
        if all(place.phase in WALKS for place in places):
            for walk in set(map(_walk_of, places)):
                known = self._walks.setdefault(walk, _Walk())
                known.gap_s = max(known.gap_s, self.still_s)

    def limit_s(self, places: Sequence[Place]) -> float:
        """Return how long ranks that are there may stand still."""
        return max((self._limit_of(place) for place in places), default=self.patience.timeout_s)

    def stop_limit_s(self) -> float:
        """Return how long a run may stand still of which a rank is stopped."""
        steps = (known for walk, known in self._walks.items() if known.gaps_s and walk[0] == "step")
        known = (self._limit_of_walk(known, None) for known in steps)
        return min([*known, self.patience.stall_after or self.patience.floor_s])

    def is_stalled(self, places: Sequence[Place], *, any_stopped: bool = False) -> bool:
        """Whether ranks that are there, all that live and have not ended, have stood still for too long."""
        if not places or not any(map(may_wait, places)):
            return False
        limit = self.limit_s(places)
        return self.still_s > (min(limit, self.stop_limit_s()) if any_stopped else limit)

    def _limit_of(self, place: Place) -> float:
        if place.phase not in WALKS:
            return self.patience.timeout_s
        return self._limit_of_walk(self._walks.get(_walk_of(place), _Walk()), place)

    def _limit_of_walk(self, walk: _Walk, place: Place | None) -> float:
        patience = self.patience
        if patience.stall_after is not None:
            is_late = place is None or (place.phase == "step" and place.run > FIRST_STEPS)
            is_first = walk.num_ended < FIRST_STEPS and not is_late  # short steps may end unseen
            return max(patience.stall_after, min(FIRST_S, patience.timeout_s)) if is_first else patience.stall_after
        if not walk.gaps_s:
            return patience.timeout_s
        return min(max(patience.floor_s, FACTOR * walk.usual_s), patience.timeout_s)


def _walk_of(place: Place) -> tuple[Phase, int]:
    return place.phase, place.program


def may_wait(place: Place) -> bool:
    """Whether a rank that is there waits for others, or may do so: in a walk always, elsewhere where it says so."""
    return place.phase in WALKS or place.wait not in (NOTHING, UNKNOWN)
