"""How many layers each stage recomputes, solved exactly: the least numbers that fit, rank by rank.

    layers recomputed      0    1    2    3    4
    rank 0 holds          95   84   73   62   51 GB      80 GB fit: 2
    rank 1 holds          88   79   …                               1     the strategy (2, 1, 0, 0)
    rank 2 holds          79   …                                    0
    rank 3 holds          70   …                                    0

What a rank holds depends on its own number alone, and no step is faster where more is recomputed. So of all tuples that
fit, the one that is least in every rank takes least time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quintsched.tuning.evaluator import Evaluator, Mask, Outcome
from quintsched.tuning.space import FULL, NONE, Columns, Ints, Space


@dataclass(frozen=True, eq=False)
class Solved:
    """The best tuples of some rows: of which rows, and what they take; rows where none fits are not among them."""

    rows: Ints
    numbers: tuple[tuple[int, ...], ...]
    """Layers recomputed by the stages of each pipeline rank."""
    outcome: Outcome


def solve(space: Space, evaluator: Evaluator, place: Ints) -> list[Solved]:
    """Return the best tuples of the rows at these places, (rows, 2), by the number of pipeline ranks."""
    pp = space.column("pp", place[:, 0])
    return [_solve(space, evaluator, place, np.flatnonzero(pp == size), int(size)) for size in np.unique(pp)]


def _solve(space: Space, evaluator: Evaluator, place: Ints, rows: Ints, pp: int) -> Solved:
    columns = space.rows(place[rows])
    numbers, fits = least_numbers(space, evaluator, columns, place[rows, 0], pp)
    rows = rows[fits]
    if not len(rows):
        return Solved(rows, (), Outcome(np.zeros(0), np.zeros(0), np.zeros(0, bool)))
    kept = {name: values[fits] for name, values in columns.items()}
    found = numbers[fits]
    outcome = evaluator.evaluate(kept, found)
    return Solved(rows, tuple(tuple(row) for row in found.tolist()), outcome)


def least_numbers(space: Space, evaluator: Evaluator, columns: Columns, frames: Ints, pp: int) -> tuple[Ints, Mask]:
    """Return the least numbers that fit, (rows, pp), and for which rows they do and are called by no other word."""
    most = int(space.stage_layers(frames).max(initial=0))
    least = np.full((len(frames), pp), most + 1)
    for number in range(most, -1, -1):
        held = evaluator.rank_bytes({**columns, "recompute": np.full(len(frames), number, np.int64)})
        least[held <= evaluator.capacity_bytes] = number
        # Written in falling order, so that the least number that fits is what remains.
    layers = rank_layers(space, frames, pp)
    fits = (least <= layers).all(axis=1)
    if NONE in space.recomputes:
        fits &= least.any(axis=1)
    if FULL in space.recomputes:
        fits &= (least < layers).any(axis=1)
    return least, np.asarray(fits)


def rank_layers(space: Space, frames: Ints, pp: int) -> Ints:
    """Return how many layers the largest stage of each rank has, (frames, pp): the first stages are larger."""
    small = np.arange(pp) >= space.large_stages(frames)[:, None]
    found: Ints = space.stage_layers(frames)[:, None] - small
    return found
