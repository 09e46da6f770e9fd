"""Places of a microbatch's computations in a period, by a beam search along its way through the stages and back.

    rank 2   ▕ F2  .  F29  B29  W29  .  ▏    B2 has come: it may begin where a rank is free, and where W2 will still
                                             have room in one of the gaps that are left

Few ranks have time to spare, so a computation is only put where all those that are still to come on its rank fit into
the gaps beside it. Of all partial placements, those stay whose activations fill the caps least, counted for each rank
with what the rest of the way takes at least. A placement that goes over a cap is dropped; other random numbers in the
score lead to another one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from quintsched.ir.instruction_columns import Amounts
from quintsched.solve.order_problem import EPSILON, FORWARD, INPUT_HALF, WEIGHT_HALF
from quintsched.solve.search_problem import Problem

WIDTH, PLACES, WEIGHT_PLACES = 20, 3, 2
"""Partial placements that are kept, and places that are tried for a computation and for the weight half after it."""
POWER = 4
"""Exponent of a rank's share of its cap in the score: the fullest rank counts most."""
FILLERS = 3
"""Most computations for which the gap beside another one is left exactly as long as they take."""


class Circle(NamedTuple):
    """Period of a rank: free places (begin, length), None while all is free; and durations of what is still to come."""

    gaps: tuple[tuple[float, float], ...] | None
    left: tuple[float, ...]


class _Partial(NamedTuple):
    """Placement of the first computations of the way: forwards, then each input half with its weight half.

    With several routes: the forwards of each, and then the halves of each, from the last one on.
    """

    shares: Amounts
    """Share of its cap that each rank will hold at least, on average."""
    circles: tuple[Circle, ...]
    starts: tuple[float, ...]


@dataclass
class PeriodPlacing:
    """Search for the start of each computation of the first microbatch; another one starts a period later."""

    problem: Problem
    period: float
    _fits: dict[tuple[tuple[float, ...], tuple[float, ...]], bool] = field(default_factory=dict)
    _fillers: dict[tuple[float, ...], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, stages = self.problem, self.problem.num_stages
        self._slack, self._way = self.period * EPSILON, stages // problem.routes
        times, delays = problem.tables
        self._times: list[list[float]] = times[:, :, 0].tolist()
        self._delays: list[list[float]] = delays[:, :, 0].tolist()
        self._held = [problem.rises[problem.number(FORWARD, stage, 0)] for stage in range(stages)]
        self._added = [problem.rises[problem.number(INPUT_HALF, stage, 0)] for stage in range(stages)]
        caps = [problem.caps[rank] for rank in problem.stage_to_pp]
        self._shares = [
            held / cap / self.period if 0 < cap < math.inf else 1 / self.period / stages
            for held, cap in zip(self._held, caps, strict=True)
        ]
        self._more = [one / cap / self.period if cap else 0.0 for one, cap in zip(self._added, caps, strict=True)]

    def place(self, rng: random.Random, noise: float) -> list[float] | None:
        """Return the starts by kind and stage; None if none was found that keep to the caps.

        Args:
            rng: source of the random part of the score.
            noise: most by which it raises a score, as a share of it.
        """
        stages, ranks = self.problem.num_stages, self.problem.stage_to_pp
        routes = [range(first, first + self._way) for first in range(0, stages, self._way)]
        kept, held = self._empty(), [np.zeros(self.problem.pp) for _ in routes]
        for route, shares in zip(routes, held, strict=True):
            for stage in route:
                found = [one for partial in kept for one in self._forwards(partial, stage, shares)]
                kept = self._best(found, rng, noise)
                shares[ranks[stage]] += self._shares[stage]
        for route, shares in reversed([*zip(routes, held, strict=True)]):
            for stage in reversed(route):
                found = [one for partial in kept for one in self._backwards(partial, stage, shares)]
                kept = self._best(found, rng, noise)
                shares[ranks[stage]] -= self._shares[stage]
        if not kept:
            return None
        starts = kept[0].starts
        return [*starts[:stages], *starts[stages::2][::-1], *starts[stages + 1 :: 2][::-1]]

    def _empty(self) -> list[_Partial]:
        """Return the placement of nothing; none where a rank's computations take longer than the period."""
        problem = self.problem
        ranks, shares = problem.stage_to_pp, np.zeros(problem.pp)
        left: list[list[float]] = [[] for _ in range(problem.pp)]
        ways = problem.way_out[:, 0] + problem.way_back[:, 0]
        for stage, rank in enumerate(ranks):
            left[rank] += [times[stage] for times in self._times]
            halves = self._times[INPUT_HALF][stage] + self._times[WEIGHT_HALF][stage]
            shares[rank] += self._shares[stage] * (ways[stage] + halves) + self._more[stage] * halves
        if any(sum(times) > self.period + self._slack for times in left):
            return []
        return [_Partial(shares, tuple(Circle(None, tuple(sorted(times))) for times in left), ())]

    def _best(self, found: list[_Partial], rng: random.Random, noise: float) -> list[_Partial]:
        """Return the partial placements of the least scores."""
        if not found:
            return found
        scores = (np.array([one.shares for one in found]) ** POWER).sum(axis=1)
        if noise:
            scores *= [1 + noise * rng.random() for _ in found]
        return [found[place] for place in np.argsort(scores, kind="stable")[:WIDTH]]

    def _forwards(self, partial: _Partial, stage: int, shares: Amounts) -> list[_Partial]:
        """Return a placement with a stage's forward added; while it waits, ranks hold these shares longer."""
        rank, duration = self.problem.stage_to_pp[stage], self._times[FORWARD][stage]
        ready = self._end_of_need(partial.starts, FORWARD, stage) + self._delays[FORWARD][stage]
        return [
            _Partial(
                partial.shares + shares * (start - ready),
                _replaced(partial.circles, rank, circle),
                (*partial.starts, start),
            )
            for start, circle in self._places(partial.circles[rank], ready, duration, PLACES)
        ]

    def _backwards(self, partial: _Partial, stage: int, shares: Amounts) -> list[_Partial]:
        """Return a placement with both halves of a stage's backward added, where the rank keeps to its cap."""
        rank, found = self.problem.stage_to_pp[stage], list[_Partial]()
        half, weight = self._times[INPUT_HALF][stage], self._times[WEIGHT_HALF][stage]
        ready = self._end_of_need(partial.starts, INPUT_HALF, stage) + self._delays[INPUT_HALF][stage]
        for start, circle in self._places(partial.circles[rank], ready, half, PLACES):
            end = start + half
            for after, rest in self._places(circle, end, weight, WEIGHT_PLACES):
                starts = (*partial.starts, start, after)
                if not self._keeps_to_cap(rank, stage, starts, end):
                    continue
                held = partial.shares + shares * (start - ready)
                held[rank] += (self._shares[stage] + self._more[stage]) * (after - end)
                found.append(_Partial(held, _replaced(partial.circles, rank, rest), starts))
        return found

    def _end_of_need(self, starts: tuple[float, ...], kind: int, stage: int) -> float:
        """Return the end of what a stage's forward or input half needs; 0 for the first forward of a route."""
        if kind == FORWARD:
            return starts[stage - 1] + self._times[FORWARD][stage - 1] if stage % self._way else 0.0
        if (stage + 1) % self._way == 0:
            return starts[stage] + self._times[FORWARD][stage]
        return starts[self._place_of_half(stage + 1)] + self._times[INPUT_HALF][stage + 1]

    def _place_of_half(self, stage: int) -> int:
        """Return the place of a stage's input half among the starts; its weight half follows."""
        return 3 * self.problem.num_stages - 2 - 2 * stage

    def _keeps_to_cap(self, rank: int, stage: int, starts: tuple[float, ...], now: float) -> bool:
        """Return whether all microbatches together keep to a rank's cap where it grows, as far as is placed."""
        cap = self.problem.caps[rank]
        if math.isinf(cap):
            return True
        lives = []
        for mine, where in enumerate(self.problem.stage_to_pp):
            if where == rank:
                place = self._place_of_half(mine)
                last = now if mine // self._way == stage // self._way else starts[mine] + self.problem.way_out[mine, 0]
                if mine >= stage:
                    last = starts[place + 1] + self._times[WEIGHT_HALF][mine]
                lives.append((starts[mine], last, self._held[mine]))
                if self._added[mine] and mine >= stage:
                    lives.append((starts[place], last, self._added[mine]))
        for begin, _, _ in lives:
            held = 0.0
            for start, end, amount in lives:
                turns = math.floor((begin - start) / self.period + EPSILON)
                held += amount * (turns - math.floor((begin - end) / self.period + EPSILON))
            if held > cap * (1 + EPSILON):
                return False
        return True

    def _places(self, circle: Circle, earliest: float, duration: float, most: int) -> list[tuple[float, Circle]]:
        """Return the first starts from `earliest` on at which the rest has room, and the circle after each."""
        at = circle.left.index(duration)
        left, found = circle.left[:at] + circle.left[at + 1 :], list[tuple[float, Circle]]()
        if circle.gaps is None:
            gap = ((earliest + duration) % self.period, self.period - duration)
            return [(earliest, Circle((gap,), left))]
        least = left[0] if left else math.inf
        for wait, place, offset in sorted(self._offsets(circle.gaps, left, earliest % self.period, duration)):
            begin, length = circle.gaps[place]
            parts = (begin, offset), ((begin + offset + duration) % self.period, length - offset - duration)
            gaps = (
                *circle.gaps[:place],
                *(part for part in parts if part[1] >= least - self._slack),
                *circle.gaps[place + 1 :],
            )
            if self._have_room(tuple(sorted(gap[1] for gap in gaps)), left):
                found.append((earliest + wait, Circle(gaps, left)))
                if len(found) == most:
                    break
        return found

    def _offsets(
        self, gaps: tuple[tuple[float, float], ...], left: tuple[float, ...], moment: float, duration: float
    ) -> set[tuple[float, int, float]]:
        """Return (wait, gap, offset in it): as early as possible, or with room for others exactly on one side."""
        found = set[tuple[float, int, float]]()
        for place, (begin, length) in enumerate(gaps):
            most = length - duration
            if most < -self._slack:
                continue
            most, first, wait = max(most, 0.0), (moment - begin) % self.period, 0.0
            if first > most + self._slack:
                first, wait = 0.0, self.period - first if self.period - first > self._slack else 0.0
            first = min(first, most)
            found.add((wait, place, first))
            for filler in self._sums(left):
                for offset in (min(filler, most) if filler <= most + self._slack else -1.0, most - filler):
                    if offset > first:
                        found.add((wait + offset - first, place, offset))
        return found

    def _sums(self, left: tuple[float, ...]) -> list[float]:
        """Return the durations of few computations one after the other."""
        if left not in self._fillers:
            counts = range(min(FILLERS, len(left)) + 1)
            self._fillers[left] = sorted({sum(some) for count in counts for some in combinations(left, count)})
        return self._fillers[left]

    def _have_room(self, gaps: tuple[float, ...], left: tuple[float, ...]) -> bool:
        """Return whether computations, the longest first, fit into gaps."""
        if not left:
            return True
        known = self._fits.get((gaps, left))
        if known is None:
            known = any(
                self._have_room(tuple(sorted((*gaps[:place], gap - left[-1], *gaps[place + 1 :]))), left[:-1])
                for place, gap in enumerate(gaps)
                if gap >= left[-1] - self._slack and gap not in gaps[:place]
            )
            self._fits[gaps, left] = known
        return known


def _replaced(circles: tuple[Circle, ...], rank: int, circle: Circle) -> tuple[Circle, ...]:
    return (*circles[:rank], circle, *circles[rank + 1 :])
