"""Stall limits: how long a run may pause before it counts as stalled, learnt from pauses in its earlier steps.

    gaps       ─┐ the longest pause of all ranks in each of the last steps                  0.02 s  0.03 s  4.8 s  …
    limit       └▶ max(10 s, 4 × the second longest): a single pause of 5 s neither ends a run nor raises the limit

    setup, data, save, load, idle; a first step      the timeout of the run's waits, at which they would fail anyway
    new shapes in a later step are traced and proved in `setup`
    a stopped process among the ranks                the limit of a step, whatever the phase

A run stalls when no rank moves *and some rank waits for others*: ranks that all load, or all save, do not. Time counts
only as far as the hub observed it: while the hub did not run (a suspended machine), no time passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quintsched.stalls.last_reported_rank_states import Phase

from .position_in_shared_memory import NOTHING, UNKNOWN, RankPosition

FLOOR_S = 10.0
"""Minimum stall limit, in seconds, unless a limit is given."""
COMPILING_FLOOR_S = 300.0
"""The same with compiled stages, which may recompile in any step."""
FACTOR = 4.0
"""Factor of the limit over the longest pause but one of the last steps."""
REMEMBERED = 32
"""Number of last steps whose pauses are kept."""
FIRST_STEPS = 1
"""Number of steps of a program that count as first ones: warm-up makes them longer."""
TICK_S = 1.0
"""Maximum time that counts between two looks, in seconds."""

FIRST_S = 60.0
"""Limit of a first step, in seconds, where a shorter limit is given."""

WALKS: tuple[Phase, ...] = ("step", "evaluate")
"""Phases in which ranks run programs, and wait for each other."""


@dataclass(frozen=True)
class Patience:
    """Limits of a run's pauses, in seconds.

    `timeout_s` is that of its waits; `stall_after` the limit of a step, None: learnt. `compiles`: stages are compiled.
    """

    timeout_s: float = 300.0
    stall_after: float | None = None
    compiles: bool = False

    @property
    def floor_s(self) -> float:
        """Minimum of a learnt limit."""
        return COMPILING_FLOOR_S if self.compiles else FLOOR_S


@dataclass
class _PauseWalk:
    """Pauses in the steps of one program, or in its evaluations."""

    num_ended: int = 0
    gap_s: float = 0.0
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def usual_s(self) -> float:
        """The longest pause but one: a single pause does not predict the next step."""
        return sorted(self.gaps_s)[-2:][0]

    def end(self) -> None:
        self.num_ended += 1
        if self.num_ended > FIRST_STEPS:
            self.gaps_s.append(self.gap_s)
        self.gap_s = 0.0


class PositionTracker:
    """Tracks the positions of all ranks, and the time since any has moved.

    Attributes:
        still_s: seconds since a rank has moved.
    """

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.still_s = 0.0
        self._seen_s: float | None = None
        self._places: dict[int, RankPosition] = {}
        self._walks: dict[tuple[Phase, int], _PauseWalk] = {}

    def look(self, now_s: float, places: Mapping[int, RankPosition]) -> bool:
        """Record the positions of ranks at a time; return whether one has moved since the last call."""
        elapsed = 0.0 if self._seen_s is None else min(max(now_s - self._seen_s, 0.0), TICK_S)
        self._seen_s = now_s
        self.still_s += elapsed
        moved = [rank for rank, place in places.items() if self._places.get(rank) != place]
        if not moved:
            return False
        self._learn(self._places.values())
        first = min(self._places, default=-1)
        if first in moved:
            before, now = self._places[first], places[first]
            if before.phase in WALKS and before.entered != now.entered and now.phase != "setup":  # of other shapes
                self._walks.setdefault(_walk_of(before), _PauseWalk()).end()
        self.still_s = 0.0
        self._places = dict(places)
        return True

    def _learn(self, places: Collection[RankPosition]) -> None:
        """Record the current pause for the programs that ranks are in, if all ranks are in one."""
        if all(place.phase in WALKS for place in places):
            for walk in set(map(_walk_of, places)):
                known = self._walks.setdefault(walk, _PauseWalk())
                known.gap_s = max(known.gap_s, self.still_s)

    def limit_s(self, places: Sequence[RankPosition]) -> float:
        """Return the stall limit for these positions, in seconds."""
        return max((self._limit_of(place) for place in places), default=self.patience.timeout_s)

    def stop_limit_s(self) -> float:
        """Return the stall limit for a run with a stopped process, in seconds."""
        steps = (known for walk, known in self._walks.items() if known.gaps_s and walk[0] == "step")
        known = (self._limit_of_walk(known, None) for known in steps)
        return min([*known, self.patience.stall_after or self.patience.floor_s])

    def is_stalled(self, places: Sequence[RankPosition], *, any_stopped: bool = False) -> bool:
        """Whether the ranks that are alive and have not ended have paused for longer than the limit."""
        if not places or not any(map(may_wait, places)):
            return False
        limit = self.limit_s(places)
        return self.still_s > (min(limit, self.stop_limit_s()) if any_stopped else limit)

    def _limit_of(self, place: RankPosition) -> float:
        if place.phase not in WALKS:
            return self.patience.timeout_s
        return self._limit_of_walk(self._walks.get(_walk_of(place), _PauseWalk()), place)

    def _limit_of_walk(self, walk: _PauseWalk, place: RankPosition | None) -> float:
        patience = self.patience
        if patience.stall_after is not None:
            is_late = place is None or (place.phase == "step" and place.run > FIRST_STEPS)
            is_first = walk.num_ended < FIRST_STEPS and not is_late  # short steps may end between two looks
            return max(patience.stall_after, min(FIRST_S, patience.timeout_s)) if is_first else patience.stall_after
        if not walk.gaps_s:
            return patience.timeout_s
        return min(max(patience.floor_s, FACTOR * walk.usual_s), patience.timeout_s)


def _walk_of(place: RankPosition) -> tuple[Phase, int]:
    return place.phase, place.program


def may_wait(place: RankPosition) -> bool:
    """Whether a rank may wait for others: always in a program, elsewhere if its cell has a wait."""
    return place.phase in WALKS or place.wait not in (NOTHING, UNKNOWN)
