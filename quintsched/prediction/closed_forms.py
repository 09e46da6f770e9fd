"""How long the computation of a step takes under the common schedules, in closed form: longest paths of their events.

Under 1F1B a path through the events goes down the ranks with forwards and up again with backwards, so often until all
microbatches are done. Wherever it turns, it goes on with the rank's own order:

    rank 0   F0 ┐        ┌ B0 ─▶ F4 ┐         └ B3      each rank that it passes adds f + b, each turn at the bottom a
    rank 1      └ F0     B0         └ …   ⋯   B3        recomputation r, each step between ranks a message c: with n
    rank 2        └ F0 ─▶ B0 …                          turns over P ranks, (M+P-1)(f+b) + 2c(M+P-1-n) + n·r

A step takes as long as its longest path. Only few can be that: those that stay at one rank (the first, the last, one
between them: as many turns as can be) and those that always go all the way (as few). Each formula here is the largest
of such paths, so none is ever more than the simulator finds, and each says where it is the same. `f`, `i`, `w` are a
forward and the halves of a backward of one stage between the first and the last, `b` = i + w; what the first and the
last stage take besides is in `first` and `last`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float64]
"""One per strategy."""


@dataclass(frozen=True, eq=False)
class Passes:
    """What the passes of a stage take, in seconds, (n,) each."""

    f: Values
    i: Values
    w: Values

    @property
    def b(self) -> Values:
        """A whole backward."""
        return self.i + self.w

    @property
    def total(self) -> Values:
        """All three."""
        return self.f + self.i + self.w


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines under one schedule; every field has a value per pipeline, (n,), times in seconds.

    `f`, `i`, `w`, `r`: forward, halves of a backward and recomputation of one microbatch on one stage; `c`: a message;
    `first`, `last`: what the first and the last stage take more than others.
    """

    p: Values
    m: Values
    v: Values
    f: Values
    i: Values
    w: Values
    r: Values
    c: Values
    first: Passes
    last: Passes

    @property
    def b(self) -> Values:
        """A whole backward."""
        return self.i + self.w

    @property
    def stage(self) -> Values:
        """All that a stage does for a microbatch."""
        return self.f + self.r + self.b


def gpipe(s: Pipelines) -> Values:
    """All forwards, then all backwards: twice a line of stations, of which the slowest sets the pace. Exact."""
    x, y, alone = s.first, s.last, s.p == 1
    channel = np.where(alone, 0.0, s.c)
    f_most = np.where(alone, s.f + x.f + y.f, s.f + np.maximum(np.maximum(x.f, y.f), _between(s)))
    b_most = s.r + np.where(alone, s.b + x.b + y.b, s.b + np.maximum(np.maximum(x.b, y.b), _between(s)))
    once = s.p * (s.f + s.b) + 2 * s.c * (s.p - 1) + s.r + x.total + y.total
    return once + (s.m - 1) * (np.maximum(f_most, channel) + np.maximum(b_most, channel))


def _between(s: Pipelines) -> Values:
    """0 where there is a stage between the first and the last; else nothing that could be the most."""
    return np.where(s.p * s.v > 2, 0.0, -np.inf)


def one_f_one_b(s: Pipelines) -> Values:
    """1F1B with M microbatches on P ranks. Exact but for roundings of single stages where P does not divide M-1."""
    x, y, passed = s.first.total, s.last.total, s.m + s.p - 1
    down = s.p - 1

    def path(turns: Values, at_first: Values | float, at_last: Values | float) -> Values:
        return passed * (s.f + s.b) + 2 * s.c * (passed - turns) + turns * s.r + at_first * x + at_last * y

    full = np.ceil(passed / s.p)
    short = full * s.p > passed
    beside = np.maximum(s.p - 1, 1)
    stays_first = np.maximum(s.m - down, 1)
    inner = 1 + np.ceil((s.m - 1) / beside)
    paths = [
        path(s.m, 1, s.m),
        path(full, full - (short & (x <= y)), full - (short & (x > y) & (full > 2))),
        np.where(s.m > s.p, path(stays_first, stays_first, np.minimum(stays_first, 2)), 0.0),
        np.where((s.p > 2) & (s.m > 2), path(s.m - 1, 1, 2), 0.0),
        np.where(s.p > 2, path(inner, 1, inner), 0.0),
        s.m * (s.stage + x),
        _ending_at_first(s),
    ]
    alone = s.m * (s.stage + x + y)
    return np.where(s.p == 1, alone, np.maximum.reduce(paths))


def _ending_at_first(s: Pipelines) -> Values:
    """The path that stays at the first rank, where backwards with their recomputations end the step."""
    x, tail = s.first, np.minimum(s.p, s.m) - 1
    there = s.p * (s.f + s.b) + 2 * s.c * (s.p - 1) + s.r + x.total + s.last.total
    return there + np.maximum(s.m - s.p, 0) * (s.stage + x.total) + tail * (s.r + s.b + x.b)


def interleaved(s: Pipelines) -> Values:
    """Interleaved 1F1B, where messages take no longer than a pass (c <= f, c <= b)."""
    x, y, units = s.first, s.last, s.m * s.v
    round_ = (s.v - 1) * s.p
    pace = np.maximum(s.stage, np.maximum(s.f, s.b) + s.c)
    staying = s.p * s.stage + (units - round_ - s.p) * ((s.v - 1) * pace + s.stage) / s.v
    to_last = (s.v * s.p - 1) * (s.f + s.c) + x.f
    from_last = round_ * (s.b + np.maximum(s.c, s.r)) + (s.p - 1) * (s.b + s.c) + x.b
    last = to_last + staying + s.m * y.total + from_last
    warm = np.minimum(2 * (s.p - 1) + round_, units)
    first = (
        to_last
        + s.f
        + y.total
        + s.r
        + s.p * s.b
        + (s.p - 1) * s.c
        + (units - warm - 1 + (warm == units)) * s.stage
        + np.maximum(s.m - 2 * s.p + 1, 0) * x.f
        + (warm - (warm == units)) * (s.r + s.b)
        + s.m * x.b
    )
    alone = s.m * (s.v * s.stage + x.total + y.total)
    paths = [last, np.where(s.p > 1, first, 0.0), s.m * (s.v * s.stage + x.total)]
    return np.where(s.p == 1, alone, np.maximum.reduce(paths))


def zb_h1(s: Pipelines) -> Values:
    """ZB-H1: as 1F1B, but turns at the top add a weight half, and ranks end with those that they are late with."""
    x, y, passed, down = s.first, s.last, s.m + s.p - 1, s.p - 1
    xs, ys = x.f + x.i, y.f + y.i
    up = down * (s.i + s.c) + x.i + s.w + x.w
    end = np.maximum(0.0, np.minimum(s.p, s.m) * (s.w + y.w) - up)

    def path(
        turns: Values, weights: Values, at_first: Values | float, at_last: Values | float, w_last: Values | float
    ) -> Values:
        passes = passed * (s.f + s.i) + 2 * s.c * (passed - turns) + turns * s.r + at_first * xs + at_last * ys
        return passes + (weights + 1) * s.w + np.where(at_first > 1, at_first, 1) * x.w + w_last * y.w + end

    full = np.ceil(passed / s.p)
    short = full * s.p > passed
    weights = np.maximum(s.m - s.p, 0)
    stays_first = np.maximum(s.m - down, 1)
    ending = (
        s.p * (s.f + s.i)
        + 2 * s.c * down
        + s.r
        + s.w
        + x.total
        + ys
        + weights * (s.stage + x.total)
        + (np.minimum(s.p, s.m) - 1) * (s.r + s.i + s.w + x.i + x.w)
    )
    paths = [
        path(s.m, weights, 1, s.m, weights),
        path(
            full, full - 1, full - (short & (x.total <= y.total)), full - (short & (x.total > y.total) & (full > 2)), 0
        ),
        np.where(s.m > s.p, path(stays_first, weights, stays_first, np.minimum(stays_first, 2), 0), 0.0),
        np.where((s.p > 2) & (s.m > s.p), path(s.m - 1, weights, 1, 2, 0), 0.0),
        s.m * (s.stage + x.total),
        ending,
    ]
    alone = s.m * (s.stage + x.total + y.total)
    return np.where(s.p == 1, alone, np.maximum.reduce(paths))


CLOSED_FORMS: dict[str, Callable[[Pipelines], Values]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
}
"""By the schedule's name."""
