"""Closed forms of the computation time of a step under the common schedules: longest paths through their events.

Under 1F1B a path through the events goes down the ranks with forwards and up with backwards, repeatedly, until all
microbatches are done. Where it turns, it follows the rank's own order:

    rank 0   F0 ┐           ┌ B0 ─▶ F4 ┐       B3     each rank that it passes adds f + b; turning at ranks a and b,
    rank 1      └ F0       B0          └ …  ⋯ B3      it covers b - a + 1 microbatches
    rank 2           F0 ─▶ B0               B3

Messages and recomputation are part of the passes that wait for them. The step time is the length of the longest path,
and only few paths are candidates: those that stay at the first or the last rank of a run of equal ranks. Each formula
is the maximum over such paths, so none exceeds the simulator's result. They cost a few operations per pair of runs, for
any number of ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quintsched.strategies.prediction.pipeline.runs_of_equal_ranks import Each, EndRanks, Pipelines, Values, chunked


def gpipe(s: Pipelines) -> Values:
    """Return the makespan of GPipe: a line of stations, passed twice, whose slowest sets the pace."""
    there = s.ranks > 0
    pace = np.where(there, s.f, 0.0).max(axis=0) + np.where(there, s.b, 0.0).max(axis=0)
    return np.asarray((s.ranks * (s.f + s.b)).sum(axis=0) + (s.m - 1) * pace)


def one_f_one_b(s: Pipelines) -> Values:
    """Return the makespan of 1F1B."""
    return _zigzag(s, s.f + s.b, np.zeros_like(s.f))


def zb_h1(s: Pipelines) -> Values:
    """Return the makespan of ZB-H1: 1F1B of input halves; turns at the top add a weight half, others come last."""
    return _zigzag(s, s.f + s.i, s.w)


def _zigzag(s: Pipelines, passed: Values, late: Values) -> Values:
    """Return the length of the longest path that goes down and up the ranks.

    `passed` is added by a rank that is passed down and up, `late` additionally by turns at its top, from its `rank`-th
    backward on.
    """
    z = _Zigzag(s, Each(s, passed), Each(s, s.f), Each(s, passed - s.f), Each(s, late))
    found = z.both.total + z.ending + np.where(s.m > 1, z.again(), 0.0)
    bottoms = [*z.bottoms()]
    for top in s.places:
        # Down to a rank and up to this one; as often as there is room, here; down to a rank and up again.
        room = s.m - 1 - s.p + top.rank
        path = z.around(top, bottoms) + z.stays(top, room)
        found = np.where(top.exists & (room >= 0), np.maximum(found, path), found)
        found = np.where(top.exists, np.maximum(found, z.at_one_rank(top)), found)
    return found


@dataclass(frozen=True, eq=False)
class _Zigzag:
    """Contributions of ranks to a path that goes down and up: `both` if passed both ways, `f` down and `back` up."""

    s: Pipelines
    both: Each
    f: Each
    back: Each
    late: Each

    @cached_property
    def is_late(self) -> bool:
        """Whether turns at the top add anything."""
        return bool(self.late.amounts.any())

    @cached_property
    def ending(self) -> Values:
        """Extra time of weight halves left at the end, beyond the way up to the first rank."""
        s, found = self.s, np.asarray(self.late.amounts[0])
        if not self.is_late:
            return np.asarray(found)
        deep = np.minimum(s.p, s.m) - 1
        found = np.maximum(found, (deep + 1) * s.of_rank(self.late.amounts, deep) - self.back.first(deep))
        for place in s.places:
            left = np.minimum(place.rank + 1, s.m) * self.late.on(place)
            found = np.where(place.exists, np.maximum(found, left - self.back.before(place)), found)
        return np.asarray(found)

    def again(self) -> Values:
        """Return the extra length of a second way down and up, which turns at the top as low as it must."""
        deepest = np.maximum(self.s.p + 1 - self.s.m, 0.0)
        return np.where(deepest < self.s.p, self.both.total - self.both.first(deepest), 0.0)

    def bottoms(self) -> Iterator[tuple[EndRanks, Values, Values]]:
        """Yield (place, begins, ends) for the ranks at which paths may turn first and last.

        `begins`: from the first forward to this rank's turn, with its warm-up forwards at the slowest rank on the way.
        `ends`: from its last turn to the end, with the remaining backwards likewise.
        """
        s, (slow_f, slow_b) = self.s, np.zeros((2, *self.s.p.shape))
        for place in s.places:
            slow_f = np.where(place.exists, np.maximum(slow_f, self.f.on(place)), slow_f)
            slow_b = np.where(place.exists, np.maximum(slow_b, self.back.on(place) + self.late.on(place)), slow_b)
            ahead = s.p - 1 - place.rank
            ends = self.back.through(place) + ahead * slow_b
            ends = ends + np.where(ahead > 0, self.late.amounts[0], self.ending)
            if self.is_late:
                weights = np.minimum(s.p, s.m) * self.late.on(place)
                ends = np.maximum(ends, (ahead + 1) * self.back.on(place) + weights)
            yield place, self.f.through(place) + ahead * slow_f, ends

    def around(self, top: EndRanks, bottoms: list[tuple[EndRanks, Values, Values]]) -> Values:
        """Return the length of the longest paths to a rank's first backward, and from its last forward on."""
        begins, ends = np.full((2, *self.s.p.shape), -np.inf)
        for bottom, begun, ended in bottoms:
            if bottom.run >= top.run:
                possible = bottom.exists & (bottom.rank >= top.rank)
                up = self.back.through(bottom) - self.back.before(top)
                on = self.f.through(bottom) - self.f.before(top)
                begins = np.where(possible, np.maximum(begins, begun + up), begins)
                ends = np.where(possible, np.maximum(ends, on + ended), ends)
        return np.asarray(begins + ends)

    def stays(self, top: EndRanks, room: Values) -> Values:
        """Return the length of a path that stays at a rank while it passes `room` forwards."""
        w, room = self.late.on(top), np.maximum(room, 0.0)
        found = room * self.both.on(top) + np.maximum(room + 1 - top.rank, 0.0) * w
        if self.is_late:  # first one sweep over all ranks, whose turn is at least as long as theirs
            rest = np.maximum(room - self.s.p, 0.0)
            swept = self.both.total + self.late.amounts[0] + rest * self.both.on(top) + (rest + 1) * w
            found = np.where(room >= self.s.p, np.maximum(found, swept), found)
        return np.asarray(found)

    def at_one_rank(self, place: EndRanks) -> Values:
        """Return the length of paths that end at one rank with its cool-down, from its warm-up or first backward on."""
        s, ahead, w = self.s, self.s.p - 1 - place.rank, self.late.on(place)
        up = self.back.before(place)
        finish = np.maximum(s.m * w, np.maximum(s.m - 1 - place.rank, 0.0) * w + up + self.late.amounts[0])
        own, f = s.m * self.f.on(place), self.f.on(place)
        around = np.where(ahead > 0, self.both.after(place) + np.maximum(s.m - ahead, 1.0) * f, 0.0)
        return np.asarray(self.f.before(place) + s.m * self.back.on(place) + finish + np.maximum(own, around))


def interleaved(s: Pipelines) -> Values:
    """Return the makespan of interleaved 1F1B: a path at a rank continues there, or goes once around the ring.

    to a rank   ▶ its warm-up, or the ring ▶   all its own work   ▶ its cool-down, or the ring ▶   to rank 0
    """
    f, b = (
        Each(s, chunked(s, each, *ends)) for each, *ends in ((s.f, s.first.f, s.last.f), (s.b, s.first.b, s.last.b))
    )
    t, found = _Ring(s, f, b, s.v - 1), np.zeros_like(s.p)
    for place in s.places:
        work = s.m * (s.f[place.run] + s.b[place.run])
        path = t.way(place, t.f, s.first.f) + t.laps(place) + work + t.way(place, t.b, s.first.b)
        found = np.where(place.exists, np.maximum(found, path), found)
    return found


@dataclass(frozen=True, eq=False)
class _Ring:
    """Passes of one chunk, and of a way around all ranks, under a looped schedule.

    `rounds` is the number of rounds of a microbatch before it is in the last chunk.
    """

    s: Pipelines
    f: Each
    b: Each
    rounds: Values

    def way(self, place: EndRanks, each: Each, extra: Values) -> Values:
        """Return the way to a rank's first forward of the last chunk, or home from its last backward there, beyond its
        own passes meanwhile; `extra` is the first stage's.

        The longest of three: around the ring; rank by rank; a round at rank 0, and then around the ring.
        """
        s, top = self.s, place.rank == 0
        own = self.rounds * s.p * each.on(place) + top * s.p * extra
        embeds = (s.p - 1) * (each.amounts[0] + extra) + each.on(place) - each.total
        straight = each.before(place) + np.where(top, 0.0, extra)
        around: Values = self.rounds * each.total + np.maximum(embeds, 0.0) + top * extra
        return np.asarray(straight + np.maximum(around - own, 0.0))

    def laps(self, place: EndRanks) -> Values:
        """Return the excess of ways over the last rank over a rank's own warm-up and cool-down.

        They go with its first backward, or after a round of units there with a forward; at the end after a round too.
        """
        s, f, b = self.s, self.f.on(place), self.b.on(place)
        ahead, top = s.p - 1 - place.rank, place.rank == 0
        down, up = self.f.after(place), self.b.after(place)
        forwards = np.minimum(2 * ahead, s.m * s.v - 1 - self.rounds * s.p)
        embedded = top * np.clip(forwards - s.p + 1, 0.0, s.p) * s.first.f
        back = down + up + s.last.f + s.last.b - forwards * f - embedded
        bottom = s.p * (self.f.last + self.b.last + s.last.f + s.last.b)
        two, few = 2 * s.p - 1, 2 * (place.rank + 1)
        begins = down + bottom + self.f.before(place) - top * s.p * s.first.f - two * f - few * b
        ends = up + bottom + self.b.before(place) - top * s.p * s.first.b - two * b - few * f
        lap = np.maximum(back, np.where(s.m > s.p, begins, 0.0))
        last = np.where(s.m > 2 * s.p, ends, 0.0)
        return np.where(ahead > 0, np.maximum(lap, 0.0) + np.maximum(last, 0.0), 0.0)


CLOSED_FORMS: dict[str, Callable[[Pipelines], Values]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
}
"""Closed forms by the name of the schedule."""
