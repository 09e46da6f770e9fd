"""Best strategies so far: the k fastest, and the Pareto front of time and memory.

Ties are broken by memory, then by the place in the space (frame, leaf), so that the result of a search does not depend
on its order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.tuning.evaluator import Floats
from quintsched.strategies.tuning.pareto import dominated, pareto
from quintsched.strategies.tuning.strategy_space import Mask


@dataclass(frozen=True, eq=False)
class Candidates:
    """n strategies that fit: time, memory, places, and tuples for those with per-stage recomputation."""

    time_s: Floats
    memory_bytes: Floats
    place: Ints
    """Places (n, 2): frame and leaf."""
    numbers: tuple[tuple[int, ...] | None, ...] | None = None
    """Layers that the stages of each rank recompute, None for leaves without tuples; None: for all of them."""

    def __len__(self) -> int:
        return len(self.time_s)

    def take_candidates(self, index: Ints) -> Candidates:
        """Return the candidates at these indices."""
        numbers = None if self.numbers is None else tuple(self.numbers[at] for at in index.tolist())
        return replace(
            self,
            time_s=self.time_s[index],
            memory_bytes=self.memory_bytes[index],
            place=self.place[index],
            numbers=numbers,
        )

    def joined(self, other: Candidates) -> Candidates:
        """Return the candidates of both."""
        numbers = None
        if self.numbers is not None or other.numbers is not None:
            numbers = (self.numbers or (None,) * len(self)) + (other.numbers or (None,) * len(other))
        return Candidates(
            np.concatenate((self.time_s, other.time_s)),
            np.concatenate((self.memory_bytes, other.memory_bytes)),
            np.concatenate((self.place, other.place)),
            numbers,
        )


def nobody() -> Candidates:
    """Return an empty set of candidates."""
    return Candidates(np.zeros(0), np.zeros(0), np.zeros((0, 2), np.int64))


class Ranking:
    """Collects candidates and keeps the best."""

    def __init__(self, top: int, front: bool) -> None:
        self.top, self.wants_front = top, front
        self.best, self.front = nobody(), nobody()

    @property
    def limit_s(self) -> float:
        """The k-th best time: slower strategies cannot be among the best."""
        return float(self.best.time_s[-1]) if len(self.best) >= self.top else float("inf")

    def offer(self, found: Candidates) -> None:
        """Add candidates."""
        if not len(found):
            return
        if self.wants_front:
            self.front = self._front(found)
        near = found.take_candidates(np.flatnonzero(found.time_s <= self.limit_s))
        if not len(near):
            return
        joined = self.best.joined(near)
        self.best = joined.take_candidates(_order(joined)[: self.top])

    def hopeless(self, time: Floats, memory: Floats) -> Mask:
        """Return for each pair of bounds whether no strategy of that box can be kept."""
        slow: Mask = time > self.limit_s
        if not self.wants_front:
            return slow
        return slow & dominated(time, memory, self.front.time_s, self.front.memory_bytes)

    def _front(self, found: Candidates) -> Candidates:
        new = found.take_candidates(
            np.flatnonzero(~dominated(found.time_s, found.memory_bytes, self.front.time_s, self.front.memory_bytes))
        )
        joined = self.front.joined(new)
        return joined.take_candidates(
            pareto(joined.time_s, joined.memory_bytes, joined.place[:, 0], joined.place[:, 1])
        )


def _order(found: Candidates) -> Ints:
    return np.lexsort((found.place[:, 1], found.place[:, 0], found.memory_bytes, found.time_s))
