"""Exact solution for per-stage recomputation: the least numbers of layers that fit, rank by rank.

    layers recomputed      0    1    2    3    4
    rank 0 holds          95   84   73   62   51 GB      80 GB fit: 2
    rank 1 holds          88   79   …                               1     the strategy (2, 1, 0, 0)
    rank 2 holds          79   …                                    0
    rank 3 holds          70   …                                    0

A rank's memory depends on its own number alone, and more recomputation never makes a step faster. So of all tuples that
fit, the one that is least in every rank takes the least time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.fastest_strategies_so_far import Candidates, nobody
from quintsched.strategies.tuning.strategy_space import FULL, NONE, Mask, Space


@dataclass(frozen=True, eq=False)
class Solved:
    """Solutions for leaves with one number of pipeline ranks."""

    place: Ints
    """Leaves, (n, 2)."""
    least: Ints
    """Least number of recomputed layers with which each rank fits, (n, pp); more than it has, if none does."""
    found: Candidates
    """Tuples of `least` that fit and have no other name."""
    exact: Mask
    """Whether each of those has a closed form."""


def solve(space: Space, evaluator: Evaluator, place: Ints) -> Iterator[Solved]:
    """Yield the best tuples of the leaves at these places, (n, 2), by number of pipeline ranks."""
    sizes = space.column("pp", place[:, 0])
    for pp in np.unique(sizes).tolist():
        members = place[sizes == pp]
        least = least_numbers(space, evaluator, members, pp)
        rows = np.flatnonzero(is_new(space, members[:, 0], least))
        if not len(rows):
            yield Solved(members, least, nobody(), np.zeros(0, bool))
            continue
        outcome = evaluator.evaluate(space.rows(members[rows]), least[rows])
        numbers = tuple(tuple(row) for row in least[rows].tolist())
        found = Candidates(outcome.step_s, outcome.memory_bytes, members[rows], numbers)
        yield Solved(members, least, found, outcome.exact)


def least_numbers(space: Space, evaluator: Evaluator, place: Ints, pp: int) -> Ints:
    """Return the least number of recomputed layers with which each rank fits, (n, pp); one more than all if none."""
    columns = space.rows(place)
    most = int(space.stage_layers(place[:, 0]).max(initial=0))
    least = np.full((len(place), pp), most + 1)
    for number in range(most, -1, -1):  # descending, so that the least number remains
        held = evaluator.rank_bytes({**columns, "recompute": np.full(len(place), number, np.int64)})
        least[held <= evaluator.capacity_bytes] = number
    return least


def is_new(space: Space, frames: Ints, numbers: Ints) -> Mask:
    """Return for each tuple whether it is valid and not already named by another choice ("none", "full")."""
    layers = space.rank_layers(frames, numbers.shape[1])
    found = np.all(numbers <= layers, axis=1)
    if NONE in space.recomputes:
        found &= np.any(numbers, axis=1)
    if FULL in space.recomputes:
        found &= np.any(numbers < layers, axis=1)
    return np.asarray(found)
