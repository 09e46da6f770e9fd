"""Lists of numbers of different lengths, one after the other in one array: what stands for many at once.

lists    [4, 7]  []  [5]          starts   0  2  2  3          values   4  7  5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quintsched.ir.columns import Ints


@dataclass(frozen=True, eq=False)
class Ragged:
    """List k is `values[starts[k] : starts[k + 1]]`."""

    starts: Ints
    values: Ints

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> Ragged:
        """Put lists one after the other."""
        kept = [np.asarray(entries, np.int64) for entries in lists]
        return cls(np.cumsum([0, *map(len, kept)]), np.concatenate([np.zeros(0, np.int64), *kept]))

    @classmethod
    def group(cls, groups: Ints, values: Ints, num_groups: int) -> Ragged:
        """Return the values of each group, in the order given."""
        order = np.argsort(groups, kind="stable")
        return cls(np.r_[0, np.cumsum(np.bincount(groups, minlength=num_groups))], values[order])

    @property
    def lengths(self) -> Ints:
        """How long each list is."""
        return np.diff(self.starts)

    def expand(self, wanted: Ints) -> tuple[Ints, Ints]:
        """Return (places, values): all values of the lists `wanted`, and at which place of `wanted` each belongs."""
        lengths = self.lengths[wanted]
        places = np.repeat(np.arange(len(wanted)), lengths)
        within = np.arange(len(places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return places, self.values[self.starts[wanted][places] + within]

    def lists(self) -> list[tuple[int, ...]]:
        """Return the lists as tuples."""
        values, starts = self.values.tolist(), self.starts.tolist()
        return [tuple(values[a:b]) for a, b in pairwise(starts)]
