"""How long the computation of a step takes under the common schedules, in closed form: longest paths of their events.

Under 1F1B a path through the events goes down the ranks with forwards and up again with backwards, so often until all
microbatches are done. Wherever it turns, it goes on with the rank's own order:

    rank 0   F0 ┐           ┌ B0 ─▶ F4 ┐       B3     each rank that it passes adds f + b, each turn at the bottom a
    rank 1      └ F0       B0          └ …  ⋯ B3      recomputation r, each step between ranks a message c; turning
    rank 2           F0 ─▶ B0               B3        at ranks a and b, it takes up b - a + 1 microbatches

A step takes as long as its longest path, and only few can be that: those that stay between two ranks a and b, each the
first or the last of a run of equal ranks. Each formula here is the largest of such paths, so none says more than the
simulator finds. They cost a few operations per pair of runs, however many ranks and microbatches there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float64]
"""One per pipeline, (n,), or one per run of ranks and pipeline, (K, n)."""


@dataclass(frozen=True, eq=False)
class Passes:
    """What the passes of something take, in seconds: a forward and the two halves of a backward."""

    f: Values
    i: Values
    w: Values

    @property
    def b(self) -> Values:
        """A whole backward."""
        return np.add(self.i, self.w)


@dataclass(frozen=True, eq=False)
class Pipelines(Passes):
    """n pipelines, each of K runs of equal ranks, in the order of the ranks; a run may be of no ranks.

    `f`, `i`, `w`, `r` (recomputation), (K, n), are what all stages of a rank take for a microbatch; `first` and `last`,
    (n,), say how much of it belongs to the first and to the last stage alone; where that is not 0, their ranks are runs
    of their own. `c` is a message, `p` the ranks, `m` the microbatches, `v` the chunks; `bent` says that the stages go
    down the ranks and up again, so that the first rank has the last stage.
    """

    r: Values
    ranks: Values
    c: Values
    p: Values
    m: Values
    v: Values
    first: Passes
    last: Passes
    bent: bool = False

    @cached_property
    def begin(self) -> Values:
        """The first rank of each run."""
        return np.asarray(np.cumsum(self.ranks, axis=0) - self.ranks)

    @cached_property
    def end(self) -> Values:
        """The last rank of each run."""
        return np.asarray(self.begin + self.ranks - 1)

    def of_last(self, each: Values) -> Values:
        """What the last rank has of something."""
        found: Values = each[0]
        for run in range(1, len(each)):
            found = np.where(self.ranks[run] > 0, each[run], found)
        return found

    def at(self, each: Values, rank: Values) -> Values:
        """What one rank has of something."""
        found: Values = each[0]
        for run in range(1, len(each)):
            found = np.where((self.begin[run] <= rank) & (self.ranks[run] > 0), each[run], found)
        return found

    def before(self, each: Values, rank: Values) -> Values:
        """The sum of something over the ranks before one."""
        found = np.zeros_like(self.c)
        for run, amount in enumerate(each):
            found = found + amount * np.minimum(np.maximum(rank - self.begin[run], 0.0), self.ranks[run])
        return found

    def places(self) -> Iterator[tuple[int, Values, npt.NDArray[np.bool_]]]:
        """Yield (run, rank, whether there is such a rank) for both ends of each run."""
        for run, ranks in enumerate(self.ranks):
            yield run, self.begin[run], ranks > 0
            yield run, self.end[run], ranks > 1


def gpipe(s: Pipelines) -> Values:
    """All forwards, then all backwards: twice a line of stations, of which the slowest sets the pace."""
    channel = np.where(s.p > 1, s.c, 0.0)
    there = s.ranks > 0
    pace_forward = np.maximum(np.where(there, s.f, 0.0).max(axis=0), channel)
    pace_backward = np.maximum(np.where(there, s.r + s.b, 0.0).max(axis=0), channel)
    once = (s.ranks * (s.f + s.b)).sum(axis=0) + s.of_last(s.r) + 2 * s.c * (s.p - 1)
    return np.asarray(once + (s.m - 1) * (pace_forward + pace_backward))


def one_f_one_b(s: Pipelines) -> Values:
    """1F1B."""
    return _zigzag(s, s.f + s.b, np.zeros_like(s.f))


def zb_h1(s: Pipelines) -> Values:
    """ZB-H1: as 1F1B with input halves alone; turns at the top add a weight half, and ranks end with those left."""
    return _zigzag(s, s.f + s.i, s.w)


def _zigzag(s: Pipelines, both: Values, late: Values) -> Values:
    """Return the longest path that goes down and up the ranks.

    `both` is what a rank adds that is passed down and up, `late` what turns at its top add besides, from its `rank`-th
    backward on.
    """
    down, r_last = s.p - 1, s.of_last(s.r)
    back, whole = both - s.f, s.before(both, s.p)
    ending = _ending(s, back, late)
    once = whole + 2 * s.c * down + r_last
    apart = bool(s.c.any())  # without messages, no path gains by going from rank to rank
    deepest = np.maximum(s.p + 1 - s.m, 0.0)
    again = np.where(deepest <= down, once - s.before(both, deepest) - 2 * s.c * deepest, 0.0)
    found = once + ending + np.where(s.m > 1, again, 0.0)
    bottoms = [*_bottoms(s, both, late, ending)]
    for run, top, there in s.places():
        # Down to a rank and up to this one; to and fro from here to a later one; down to a rank and up again.
        room = s.m - 1 - s.p + top
        begins, ends = np.full_like(room, -np.inf), np.full_like(room, -np.inf)
        for bottom, exists, begun, ended in bottoms[2 * run :]:
            beside, possible = s.c * (bottom - top), exists & (bottom >= top)
            up = s.before(back, bottom + 1) - s.before(back, top) + beside
            on = s.before(s.f, bottom + 1) - s.before(s.f, top) + beside
            begins = np.where(possible, np.maximum(begins, begun + up), begins)
            ends = np.where(possible, np.maximum(ends, on + ended), ends)
        for last in range(run, len(s.ranks) if apart else run + 1):
            for bottom in (top, s.end[last])[: 1 + apart] if last == run else (s.end[last],):
                stay = _stay(s, both, late, (run, last), (top, bottom), room)
                if late.any():  # first one sweep of all ranks, whose turn is no less than theirs
                    swept = _stay(s, both, late, (run, last), (top, bottom), room - s.p, s.p)
                    stay = np.maximum(stay, np.where(room >= s.p, once + late[0] + swept, 0.0))
                possible = there & (s.ranks[last] > 0) & (room >= 0)
                found = np.where(possible, np.maximum(found, begins + stay + ends), found)
        found = np.where(there, np.maximum(found, _at_one_rank(s, both, late, run, top)), found)
    return found


def _bottoms(
    s: Pipelines, both: Values, late: Values, ending: Values
) -> Iterator[tuple[Values, npt.NDArray[np.bool_], Values, Values]]:
    """Yield (rank, whether there is one, begins, ends) for the ranks at which paths may turn first and last.

    `begins`: from the first forward to this rank's turn, its warm-up forwards done at the slowest rank on the way.
    `ends`: from its last turn to the end, the backwards that are left done likewise.
    """
    back, (slow_f, slow_b) = both - s.f, np.zeros((2, *s.c.shape))
    for run, rank, there in s.places():
        slow_f = np.where(there, np.maximum(slow_f, s.f[run]), slow_f)
        slow_b = np.where(there, np.maximum(slow_b, (back + s.r + late)[run]), slow_b)
        ahead, way = s.p - 1 - rank, s.c * rank
        begins = s.before(s.f, rank + 1) + way + ahead * slow_f + s.r[run]
        upward = s.before(back, rank + 1) + way + ahead * slow_b + np.where(ahead > 0, late[0], ending)
        here = back[run] + ahead * (back + s.r)[run] + np.minimum(s.p, s.m) * late[run]
        yield rank, there, begins, s.r[run] + np.maximum(upward, here)


def _ending(s: Pipelines, back: Values, late: Values) -> Values:
    """Return what the weight halves left at the end take, beyond what is passed on the way up to the first rank."""
    deep = np.minimum(s.p, s.m) - 1
    found: Values = late[0]
    if late.any():
        for rank, there in ((deep, deep >= 0), *((rank, there) for _, rank, there in s.places())):
            left = np.minimum(rank + 1, s.m) * s.at(late, rank)
            found = np.where(there, np.maximum(found, left - s.before(back, rank) - s.c * rank), found)
    return found


def _stay(
    s: Pipelines,
    both: Values,
    late: Values,
    runs: tuple[int, int],
    ends: tuple[Values, Values],
    room: Values,
    turned: Values | float = 0.0,
) -> Values:
    """Return what a path adds that goes to and fro between two ranks while it passes `room` forwards.

    `runs` are those of the ranks `ends`; so many backwards have been `turned` before.
    """
    (run, last), (top, bottom) = runs, ends
    length = np.maximum(bottom - top + 1, 1.0)
    to_top, to_bottom = s.before(both, top), s.before(both, bottom + 1)
    sweeps = np.floor(np.maximum(room, 0.0) / length)
    rest = np.maximum(room, 0.0) - sweeps * length
    sweep = to_bottom - to_top + 2 * s.c * (length - 1) + s.r[last]
    begun = sweeps * length + turned >= bottom
    high = s.before(both, top + rest) - to_top + s.r[run] + begun * late[run]
    low = to_bottom - s.before(both, bottom + 1 - rest) + s.r[last] + begun * late[last]
    one = np.maximum(both[run] + s.r[run] + begun * late[run], both[last] + s.r[last] + begun * late[last])
    singly = rest * one
    short = np.maximum(np.maximum(high, low) + 2 * s.c * (rest - 1), singly)
    turns = np.maximum(sweeps + 1 - np.ceil(np.maximum(top - turned, 0.0) / length), 0.0)
    return np.asarray(sweeps * sweep + turns * late[run] + np.where(rest > 0, short, 0.0))


def _at_one_rank(s: Pipelines, both: Values, late: Values, run: int, rank: Values) -> Values:
    """Return the paths that end at one rank with its cool-down, from its warm-up or its first backward on."""
    back, ahead = both[run] - s.f[run], s.p - 1 - rank
    up = s.before(both - s.f, rank) + s.c * rank
    finish = np.maximum(s.m * late[run], np.maximum(s.m - 1 - rank, 0.0) * late[run] + up + late[0])
    rest = s.before(s.f, rank) + s.c * rank + s.m * back + finish
    own = s.m * (s.f[run] + s.r[run])
    below = s.before(both, s.p) - s.before(both, rank + 1) + 2 * s.c * ahead + s.of_last(s.r)
    around = below + np.maximum(s.m - ahead, 1.0) * s.f[run] + (s.m - 1) * s.r[run]
    return np.asarray(rest + np.maximum(own, np.where(ahead > 0, around, 0.0)))


def interleaved(s: Pipelines) -> Values:
    """Interleaved 1F1B: units go round and round, so a path that is at one rank goes on there, or once round the ring.

    to a rank   ▶ its warm-up, or the ring ▶   all its own work   ▶ its cool-down, or the ring ▶   home
    """
    t = _Ring.of(s)
    found = np.zeros_like(s.c)
    for run, rank, there in s.places():
        slow = np.maximum(0.0, np.maximum(t.f[run], t.b[run]) + s.c - t.f[run] - t.r[run] - t.b[run])
        work = s.m * (s.f + s.b + s.r)[run] + np.maximum(s.m - s.p, 0.0) * t.rounds * slow
        path = t.begins(run, rank) + t.laps(run, rank) + work + t.ends(run, rank)
        found = np.where(there, np.maximum(found, path), found)
    return found


@dataclass(frozen=True, eq=False)
class _Ring:
    """The passes of one chunk, (K, n), and of a way round all ranks, (n,), under a looped schedule."""

    s: Pipelines
    f: Values
    b: Values
    r: Values
    rounds: Values
    """How often a microbatch comes round before it is in the last chunk."""

    @classmethod
    def of(cls, s: Pipelines) -> _Ring:
        """Take a rank's passes apart."""
        f, b = chunked(s, s.f, s.first.f, s.last.f), chunked(s, s.b, s.first.b, s.last.b)
        return cls(s, f, b, s.r / s.v, s.v - 1)

    def begins(self, run: int, rank: Values) -> Values:
        """Return the way to a rank's first forward of the last chunk, beyond the forwards that it has done by then."""
        return self._way(run, rank, self.f, np.zeros_like(self.f), self.s.first.f)

    def ends(self, run: int, rank: Values) -> Values:
        """Return the way from a rank's last backward of the last chunk, beyond the backwards that it has to do yet."""
        return self._way(run, rank, self.b, self.r, self.s.first.b)

    def _way(self, run: int, rank: Values, each: Values, again: Values, extra: Values) -> Values:
        """Return the longest of three: round the ring; rank by rank; a round at rank 0, and round the ring."""
        s, top = self.s, rank == 0
        own = self.rounds * s.p * (each + again)[run] + top * s.p * extra
        ring = s.before(each, s.p) + s.p * s.c
        embeds = (s.p - 1) * (each[0] + again[0] + extra) + (each + again)[run] - ring
        straight = s.before(each, rank) + s.c * rank + np.where(top, 0.0, extra)
        around: Values = self.rounds * ring + np.maximum(embeds, 0.0) + top * extra
        return np.asarray(straight + np.maximum(around - own, 0.0))

    def laps(self, run: int, rank: Values) -> Values:
        """Return what ways over the last rank take longer than a rank's own warm-up and cool-down.

        With its first backward, or after a round of units there with a forward; at the end after a round there too.
        """
        s, f, b, r = self.s, self.f, self.b, self.r
        ahead, top = s.p - 1 - rank, rank == 0
        down = s.before(f, s.p) - s.before(f, rank + 1) + s.c * ahead
        up = s.before(b, s.p) - s.before(b, rank + 1) + s.c * ahead
        forwards = np.minimum(2 * ahead, s.m * s.v - 1 - self.rounds * s.p)
        embedded = top * np.clip(forwards - s.p + 1, 0.0, s.p) * s.first.f
        back = down + up + s.of_last(r) + s.last.f + s.last.b - forwards * f[run] - r[run] - embedded
        bottom = s.p * (s.of_last(f) + s.of_last(r) + s.of_last(b) + s.last.f + s.last.b) + s.c
        two, few = 2 * s.p - 1, 2 * (rank + 1)
        to = s.before(f, rank) + s.c * rank - top * s.p * s.first.f
        home = s.before(b, rank) + s.c * rank - top * s.p * s.first.b
        begins = down + bottom + to - two * f[run] - few * (r[run] + b[run])
        ends = up + bottom + home - two * b[run] - (two + 1) * r[run] - few * f[run]
        lap = np.maximum(back, np.where(s.m > s.p, begins, 0.0))
        last = np.where(s.m > 2 * s.p, ends, 0.0)
        return np.where(ahead > 0, np.maximum(lap, 0.0) + np.maximum(last, 0.0), 0.0)


def chunked(s: Pipelines, each: Values, first: Values, last: Values) -> Values:
    """Return what one chunk takes of each, (K, n), without what belongs to the first and to the last stage alone."""
    rest = np.array(each)
    rest[0] -= first
    for run, end in enumerate(s.end):
        has_last = (run == 0) if s.bent else (s.ranks[run] > 0) & (end == s.p - 1)
        rest[run] -= has_last * last
    return np.asarray(rest / s.v)


CLOSED_FORMS: dict[str, Callable[[Pipelines], Values]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
}
"""By the schedule's name."""
