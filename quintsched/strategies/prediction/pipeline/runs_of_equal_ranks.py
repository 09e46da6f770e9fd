"""Pipelines as runs of equal ranks, with sums over ranks, from which closed forms are built.

p = 8, 18 layers     rank 0   1        2 … 6        7          4 runs, for any p:
                     3+emb    3      2 2 2 2 2      2+head     sums over ranks are sums over runs
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

RowNumbers: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.float64]
"""One value per pipeline, (n,), or per run of ranks and pipeline, (K, n)."""


@dataclass(frozen=True, eq=False)
class Passes:
    """Times of passes, in seconds: a forward and the two halves of a backward."""

    f: Values
    i: Values
    w: Values

    @property
    def b(self) -> Values:
        """Full backward."""
        return np.add(self.i, self.w)


@dataclass(frozen=True, eq=False)
class Pipelines(Passes):
    """n pipelines, each of K runs of equal ranks, in order of rank; a run may be empty.

    `f`, `i`, `w`, (K, n), are the times of all stages of a rank for a microbatch; `first` and `last`, (n,), are the
    parts that belong to the first and to the last stage alone; if they are not 0, those ranks are runs of their own.
    `p` are the ranks, `m` the microbatches, `v` the chunks; `bent`: the stages go down the ranks and up again, so that
    the first rank has the last stage.
    """

    ranks: Values
    p: Values
    m: Values
    v: Values
    first: Passes
    last: Passes
    bent: bool = False

    @cached_property
    def begin(self) -> Values:
        """First rank of each run."""
        return np.asarray(np.cumsum(self.ranks, axis=0) - self.ranks)

    @cached_property
    def end(self) -> Values:
        """Last rank of each run."""
        return np.asarray(self.begin + self.ranks - 1)

    def of_rank(self, each: Values, rank: Values) -> Values:
        """Return one rank's value."""
        found: Values = each[0]
        for run in range(1, len(each)):
            found = np.where((self.begin[run] <= rank) & (self.ranks[run] > 0), each[run], found)
        return found

    @cached_property
    def places(self) -> tuple[EndRanks, ...]:
        """Both ends of each run, in order of rank, as far as any pipeline has them."""
        found = []
        for run, ranks in enumerate(self.ranks):
            if (ranks > 0).any():
                found.append(EndRanks(run, self.begin[run], 0.0, ranks > 0))
            if (ranks > 1).any():
                found.append(EndRanks(run, self.end[run], np.maximum(ranks - 1, 0.0), ranks > 1))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class EndRanks:
    """Rank of each pipeline at an end of a run; `inside` is the number of ranks of the run before it."""

    run: int
    rank: Values
    inside: Values | float
    exists: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Each:
    """Value per rank, given per run, (K, n), with sums over ranks."""

    s: Pipelines
    amounts: Values

    @cached_property
    def _sums(self) -> Values:
        return np.asarray(np.cumsum(self.s.ranks * self.amounts, axis=0))

    @property
    def total(self) -> Values:
        """Sum over all ranks."""
        return np.asarray(self._sums[-1])

    @cached_property
    def last(self) -> Values:
        """Value of the last rank."""
        return self.s.of_rank(self.amounts, self.s.p - 1)

    def on(self, place: EndRanks) -> Values:
        """Value of the rank at a place."""
        return np.asarray(self.amounts[place.run])

    def before(self, place: EndRanks) -> Values:
        """Sum over the ranks before a place."""
        within = place.inside * self.amounts[place.run]
        return np.asarray(within if place.run == 0 else self._sums[place.run - 1] + within)

    def through(self, place: EndRanks) -> Values:
        """Sum over the ranks up to a place, included."""
        return np.asarray(self.before(place) + self.amounts[place.run])

    def after(self, place: EndRanks) -> Values:
        """Sum over the ranks after a place."""
        return np.asarray(self.total - self.through(place))

    def first(self, ranks: Values) -> Values:
        """Sum over the first `ranks` ranks."""
        found = np.zeros_like(self.s.p)
        for run, amount in enumerate(self.amounts):
            found = found + amount * np.minimum(np.maximum(ranks - self.s.begin[run], 0.0), self.s.ranks[run])
        return found


def chunked(s: Pipelines, each: Values, first: Values, last: Values) -> Values:
    """Return the time of one chunk of each run, (K, n), without the parts of the first and the last stage alone."""
    rest = np.array(each)
    rest[0] -= first
    for run, end in enumerate(s.end):
        has_last = (run == 0) if s.bent else (s.ranks[run] > 0) & (end == s.p - 1)
        rest[run] -= has_last * last
    return np.asarray(rest / s.v)
