"""Closed forms of the computation time of a step under the common schedules: longest paths through their events.

Under 1F1B a path through the events goes down the ranks with forwards and up with backwards, repeatedly, until all
microbatches are done. Where it turns, it follows the rank's own order:

    rank 0   F0 ┐           ┌ B0 ─▶ F4 ┐       B3     each rank that it passes adds f + b, each turn at the bottom a
    rank 1      └ F0       B0          └ …  ⋯ B3      recomputation r, each step between ranks a message c; turning
    rank 2           F0 ─▶ B0               B3        at ranks a and b, it covers b - a + 1 microbatches

The step time is the length of the longest path, and only few paths are candidates: those that stay between two ranks a
and b, each the first or the last of a run of equal ranks. Each formula is the maximum over such paths, so none exceeds
the simulator's result (except ZB-H1 with long messages: by 0.3 %). They cost a few operations per pair of runs, for any
number of ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quintsched.strategies.prediction.pipeline.equal_ranks import Each, EndRanks, Pipelines, Values, chunked


def gpipe(s: Pipelines) -> Values:
    """Return the makespan of GPipe: a line of stations, passed twice, whose slowest sets the pace."""
    channel = np.where(s.p > 1, s.c, 0.0)
    there = s.ranks > 0
    pace_forward = np.maximum(np.where(there, s.f, 0.0).max(axis=0), channel)
    pace_backward = np.maximum(np.where(there, s.r + s.b, 0.0).max(axis=0), channel)
    once = (s.ranks * (s.f + s.b)).sum(axis=0) + Each(s, s.r).last + 2 * s.c * (s.p - 1)
    return np.asarray(once + (s.m - 1) * (pace_forward + pace_backward))


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
    z = _Zigzag(s, Each(s, passed), Each(s, s.f), Each(s, passed - s.f), Each(s, s.r), Each(s, late))
    apart = bool(s.c.any())  # without messages, no path is longer for changing between ranks
    found = z.once + z.ending + np.where(s.m > 1, z.again(), 0.0)
    bottoms = [*z.bottoms()]
    for top in s.places:
        # Down to a rank and up to this one; back and forth between here and a later one; down to a rank and up again.
        room = s.m - 1 - s.p + top.rank
        around = z.around(top, bottoms)
        for bottom in s.places if apart else (top,):
            if bottom.run >= top.run:
                possible = top.exists & bottom.exists & (bottom.rank >= top.rank) & (room >= 0)
                found = np.where(possible, np.maximum(found, around + z.stays(top, bottom, room)), found)
        found = np.where(top.exists, np.maximum(found, z.at_one_rank(top)), found)
    return found


@dataclass(frozen=True, eq=False)
class _Zigzag:
    """Contributions of ranks to a path that goes down and up: `both` if passed both ways, `f` down and `back` up."""

    s: Pipelines
    both: Each
    f: Each
    back: Each
    r: Each
    late: Each

    @cached_property
    def is_late(self) -> bool:
        """Whether turns at the top add anything."""
        return bool(self.late.amounts.any())

    @cached_property
    def once(self) -> Values:
        """Length of a path down all ranks and up again."""
        return np.asarray(self.both.total + 2 * self.s.c * (self.s.p - 1) + self.r.last)

    @cached_property
    def ending(self) -> Values:
        """Extra time of weight halves left at the end, beyond the way up to the first rank."""
        s, found = self.s, np.asarray(self.late.amounts[0])
        if not self.is_late:
            return np.asarray(found)
        deep = np.minimum(s.p, s.m) - 1
        found = np.maximum(found, (deep + 1) * s.of_rank(self.late.amounts, deep) - self.back.first(deep) - s.c * deep)
        for place in s.places:
            left = np.minimum(place.rank + 1, s.m) * self.late.on(place)
            over = left - self.back.before(place) - s.c * place.rank
            found = np.where(place.exists, np.maximum(found, over), found)
        return np.asarray(found)

    def again(self) -> Values:
        """Return the extra length of a second way down and up, which turns at the top as low as it must."""
        deepest = np.maximum(self.s.p + 1 - self.s.m, 0.0)
        down = self.once - self.both.first(deepest) - 2 * self.s.c * deepest
        return np.where(deepest < self.s.p, down, 0.0)

    def bottoms(self) -> Iterator[tuple[EndRanks, Values, Values]]:
        """Yield (place, begins, ends) for the ranks at which paths may turn first and last.

        `begins`: from the first forward to this rank's turn, with its warm-up forwards at the slowest rank on the way.
        `ends`: from its last turn to the end, with the remaining backwards likewise.
        """
        s, (slow_f, slow_b) = self.s, np.zeros((2, *self.s.c.shape))
        left = self.back.amounts + self.r.amounts
        for place in s.places:
            slow_f = np.where(place.exists, np.maximum(slow_f, self.f.on(place)), slow_f)
            slow_b = np.where(place.exists, np.maximum(slow_b, left[place.run] + self.late.on(place)), slow_b)
            ahead, way = s.p - 1 - place.rank, s.c * place.rank
            begins = self.f.through(place) + way + ahead * slow_f + self.r.on(place)
            ends = self.back.through(place) + way + ahead * slow_b
            ends = ends + np.where(ahead > 0, self.late.amounts[0], self.ending)
            if self.is_late:
                weights = np.minimum(s.p, s.m) * self.late.on(place)
                ends = np.maximum(ends, self.back.on(place) + ahead * left[place.run] + weights)
            yield place, begins, self.r.on(place) + ends

    def around(self, top: EndRanks, bottoms: list[tuple[EndRanks, Values, Values]]) -> Values:
        """Return the length of the longest paths to a rank's first backward, and from its last forward on."""
        begins, ends = np.full((2, *self.s.c.shape), -np.inf)
        for bottom, begun, ended in bottoms:
            if bottom.run >= top.run:
                beside, possible = self.s.c * (bottom.rank - top.rank), bottom.exists & (bottom.rank >= top.rank)
                up = self.back.through(bottom) - self.back.before(top) + beside
                on = self.f.through(bottom) - self.f.before(top) + beside
                begins = np.where(possible, np.maximum(begins, begun + up), begins)
                ends = np.where(possible, np.maximum(ends, on + ended), ends)
        return np.asarray(begins + ends)

    def stays(self, top: EndRanks, bottom: EndRanks, room: Values) -> Values:
        """Return the length of a path that goes back and forth between two ranks while it passes `room` forwards."""
        found = self._to_and_fro(top, bottom, room, 0.0)
        if self.is_late:  # first one sweep over all ranks, whose turn is at least as long as theirs
            swept = self._to_and_fro(top, bottom, room - self.s.p, self.s.p)
            first = np.where(room >= self.s.p, self.once + self.late.amounts[0] + swept, 0.0)
            found = np.maximum(found, first)
        return found

    def _to_and_fro(self, top: EndRanks, bottom: EndRanks, room: Values, turned: Values | float) -> Values:
        """Return the same after `turned` backwards."""
        r_top, r_bottom, w_top = self.r.on(top), self.r.on(bottom), self.late.on(top)
        room = np.maximum(room, 0.0)
        if top is bottom:
            turns = np.maximum(room + 1 - np.maximum(top.rank - turned, 0.0), 0.0)
            return np.asarray(room * (self.both.on(top) + r_top) + turns * w_top)
        length = np.maximum(bottom.rank - top.rank + 1, 1.0)
        sweeps = np.floor(room / length)
        rest = room - sweeps * length
        sweep = self.both.through(bottom) - self.both.before(top) + 2 * self.s.c * (length - 1) + r_bottom
        begun = sweeps * length + turned >= bottom.rank
        high = self.both.first(top.rank + rest) - self.both.before(top) + r_top + begun * w_top
        low = self.both.through(bottom) - self.both.first(bottom.rank + 1 - rest) + r_bottom
        low = low + begun * self.late.on(bottom)
        one = np.maximum(self.both.on(top) + r_top + begun * w_top, self.both.on(bottom) + r_bottom)
        short = np.maximum(np.maximum(high, low) + 2 * self.s.c * (rest - 1), rest * one)
        turns = np.maximum(sweeps + 1 - np.ceil(np.maximum(top.rank - turned, 0.0) / length), 0.0)
        return np.asarray(sweeps * sweep + turns * w_top + np.where(rest > 0, short, 0.0))

    def at_one_rank(self, place: EndRanks) -> Values:
        """Return the length of paths that end at one rank with its cool-down, from its warm-up or first backward on."""
        s, ahead, w = self.s, self.s.p - 1 - place.rank, self.late.on(place)
        up = self.back.before(place) + s.c * place.rank
        finish = np.maximum(s.m * w, np.maximum(s.m - 1 - place.rank, 0.0) * w + up + self.late.amounts[0])
        rest = self.f.before(place) + s.c * place.rank + s.m * self.back.on(place) + finish
        own = s.m * (self.f.on(place) + self.r.on(place))
        below = self.both.after(place) + 2 * s.c * ahead + self.r.last
        around = below + np.maximum(s.m - ahead, 1.0) * self.f.on(place) + (s.m - 1) * self.r.on(place)
        return np.asarray(rest + np.maximum(own, np.where(ahead > 0, around, 0.0)))


def interleaved(s: Pipelines) -> Values:
    """Return the makespan of interleaved 1F1B: a path at a rank continues there, or goes once around the ring.

    to a rank   ▶ its warm-up, or the ring ▶   all its own work   ▶ its cool-down, or the ring ▶   to rank 0
    """
    t = _Ring.from_passes(s)
    found = np.zeros_like(s.c)
    for place in s.places:
        run = place.run
        work = s.m * (s.f[run] + s.b[run] + s.r[run])
        if s.c.any():
            slow = np.maximum(t.f.on(place), t.b.on(place)) + s.c - t.f.on(place) - t.r.on(place) - t.b.on(place)
            work = work + np.maximum(s.m - s.p, 0.0) * t.rounds * np.maximum(slow, 0.0)
        path = t.begins(place) + t.laps(place) + work + t.ends(place)
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
    r: Each
    rounds: Values

    @classmethod
    def from_passes(cls, s: Pipelines) -> _Ring:
        """Divide a rank's passes into those of its chunks."""
        f, b = chunked(s, s.f, s.first.f, s.last.f), chunked(s, s.b, s.first.b, s.last.b)
        return cls(s, Each(s, f), Each(s, b), Each(s, s.r / s.v), s.v - 1)

    def begins(self, place: EndRanks) -> Values:
        """Return the way to a rank's first forward of the last chunk, beyond the forwards that it has done by then."""
        return self._way(place, self.f, 0.0, 0.0, self.s.first.f)

    def ends(self, place: EndRanks) -> Values:
        """Return the way from a rank's last backward of the last chunk, beyond its own remaining backwards."""
        return self._way(place, self.b, self.r.on(place), self.r.amounts[0], self.s.first.b)

    def _way(
        self, place: EndRanks, each: Each, again: Values | float, again_first: Values | float, extra: Values
    ) -> Values:
        """Return the longest of three: around the ring; rank by rank; a round at rank 0, and then around the ring."""
        s, top = self.s, place.rank == 0
        own = self.rounds * s.p * (each.on(place) + again) + top * s.p * extra
        ring = each.total + s.p * s.c
        embeds = (s.p - 1) * (each.amounts[0] + again_first + extra) + each.on(place) + again - ring
        straight = each.before(place) + s.c * place.rank + np.where(top, 0.0, extra)
        around: Values = self.rounds * ring + np.maximum(embeds, 0.0) + top * extra
        return np.asarray(straight + np.maximum(around - own, 0.0))

    def laps(self, place: EndRanks) -> Values:
        """Return the excess of ways over the last rank over a rank's own warm-up and cool-down.

        They go with its first backward, or after a round of units there with a forward; at the end after a round too.
        """
        s, f, b, r = self.s, self.f.on(place), self.b.on(place), self.r.on(place)
        ahead, top = s.p - 1 - place.rank, place.rank == 0
        down, up = self.f.after(place) + s.c * ahead, self.b.after(place) + s.c * ahead
        forwards = np.minimum(2 * ahead, s.m * s.v - 1 - self.rounds * s.p)
        embedded = top * np.clip(forwards - s.p + 1, 0.0, s.p) * s.first.f
        back = down + up + self.r.last + s.last.f + s.last.b - forwards * f - r - embedded
        bottom = s.p * (self.f.last + self.r.last + self.b.last + s.last.f + s.last.b) + s.c
        two, few = 2 * s.p - 1, 2 * (place.rank + 1)
        to = self.f.before(place) + s.c * place.rank - top * s.p * s.first.f
        home = self.b.before(place) + s.c * place.rank - top * s.p * s.first.b
        begins = down + bottom + to - two * f - few * (r + b)
        ends = up + bottom + home - two * b - (two + 1) * r - few * f
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
