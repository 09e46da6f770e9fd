"""Ragged array: lists of integers of different lengths, stored one after the other (as in CSR).

lists    [4, 7]  []  [5]          starts   0  2  2  3          values   4  7  5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quintsched.ir.instruction_columns import Ints


@dataclass(frozen=True, eq=False)
class Ragged:
    """Ragged array in which list k is `values[starts[k] : starts[k + 1]]`."""

    starts: Ints
    values: Ints

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> Ragged:
        """Concatenate lists into one ragged array."""
        kept = [np.asarray(entries, np.int64) for entries in lists]
        return cls(np.cumsum([0, *map(len, kept)]), np.concatenate([np.zeros(0, np.int64), *kept]))

    @classmethod
    def group(cls, groups: Ints, values: Ints, num_groups: int) -> Ragged:
        """Return one list per group, with the group's values in the order given."""
        order = np.argsort(groups, kind="stable")
        return cls(np.r_[0, np.cumsum(np.bincount(groups, minlength=num_groups))], values[order])

    @property
    def lengths(self) -> Ints:
        """Length of each list."""
        return np.diff(self.starts)

    def expand(self, wanted: Ints) -> tuple[Ints, Ints]:
        """Return (places, values): the concatenated values of the lists `wanted`, each with its index in `wanted`."""
        lengths = self.lengths[wanted]
        places = np.repeat(np.arange(len(wanted)), lengths)
        within = np.arange(len(places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return places, self.values[self.starts[wanted][places] + within]

    def lists(self) -> list[tuple[int, ...]]:
        """Return the lists as tuples."""
        values, starts = self.values.tolist(), self.starts.tolist()
        return [tuple(values[a:b]) for a, b in pairwise(starts)]
