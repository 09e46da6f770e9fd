"""Pipelines as runs of equal ranks, and sums over their ranks: what closed forms are made of.

p = 8, 18 layers     rank 0   1        2 … 6        7          4 runs, whatever p is:
                     3+emb    3      2 2 2 2 2      2+head     sums over ranks are sums over runs
"""

from __future__ import annotations

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

    def at(self, each: Values, rank: Values) -> Values:
        """What one rank has of something."""
        found: Values = each[0]
        for run in range(1, len(each)):
            found = np.where((self.begin[run] <= rank) & (self.ranks[run] > 0), each[run], found)
        return found

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Both ends of each run, in the order of the ranks; not those that no pipeline has."""
        found = []
        for run, ranks in enumerate(self.ranks):
            if (ranks > 0).any():
                found.append(Place(run, self.begin[run], 0.0, ranks > 0))
            if (ranks > 1).any():
                found.append(Place(run, self.end[run], np.maximum(ranks - 1, 0.0), ranks > 1))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Place:
    """A rank of each pipeline, at an end of a run; `inside` says how many ranks of the run are before it."""

    run: int
    rank: Values
    inside: Values | float
    exists: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Each:
    """Something that each rank has, (K, n), and its sums over ranks."""

    s: Pipelines
    amounts: Values

    @cached_property
    def _sums(self) -> Values:
        return np.asarray(np.cumsum(self.s.ranks * self.amounts, axis=0))

    @property
    def total(self) -> Values:
        """Over all ranks."""
        return np.asarray(self._sums[-1])

    @cached_property
    def last(self) -> Values:
        """What the last rank has."""
        return self.s.at(self.amounts, self.s.p - 1)

    def at(self, place: Place) -> Values:
        """What the rank at a place has."""
        return np.asarray(self.amounts[place.run])

    def before(self, place: Place) -> Values:
        """The sum over the ranks before a place."""
        within = place.inside * self.amounts[place.run]
        return np.asarray(within if place.run == 0 else self._sums[place.run - 1] + within)

    def through(self, place: Place) -> Values:
        """The same with the rank there."""
        return np.asarray(self.before(place) + self.amounts[place.run])

    def after(self, place: Place) -> Values:
        """The sum over the ranks after a place."""
        return np.asarray(self.total - self.through(place))

    def first(self, ranks: Values) -> Values:
        """The sum over so many ranks, from the first on."""
        found = np.zeros_like(self.s.c)
        for run, amount in enumerate(self.amounts):
            found = found + amount * np.minimum(np.maximum(ranks - self.s.begin[run], 0.0), self.s.ranks[run])
        return found


def chunked(s: Pipelines, each: Values, first: Values, last: Values) -> Values:
    """Return what one chunk takes of each, (K, n), without what belongs to the first and to the last stage alone."""
    rest = np.array(each)
    rest[0] -= first
    for run, end in enumerate(s.end):
        has_last = (run == 0) if s.bent else (s.ranks[run] > 0) & (end == s.p - 1)
        rest[run] -= has_last * last
    return np.asarray(rest / s.v)
