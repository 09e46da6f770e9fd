"""Estimate of the time after a move within a rank's order, from a few computations only.

    rank 1   … W0 [F3 B1 W1] F4 …      F3 goes behind W1: starts of B1, W1, F3 follow from what comes in from other
                  [B1 W1 F3]           ranks, and their ends from what goes out; all other computations keep theirs

The longest path through the computations that change places is the least time after a move (Taillard 1994; Balas and
Vazacopoulos 1998). It may be too long only where a path leaves these computations and comes back to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quintsched.solve.order_problem import Objective
from quintsched.solve.order_timing import Timing
from quintsched.solve.search_problem import Problem


@dataclass(frozen=True)
class MoveEstimates:
    """Times of orders, as far as moves need them.

    Attributes:
        problem, orders, objective: what is timed; `orders` are read, not copied.
        ends: end of each computation.
        to_go: longest time from the start of each computation until the value is reached.
        last: the same from the end of each rank's last computation.
    """

    problem: Problem
    orders: list[list[int]]
    objective: Objective
    ends: list[float]
    to_go: list[float]
    last: list[float]

    @classmethod
    def of(cls, problem: Problem, orders: list[list[int]], timing: Timing, objective: Objective) -> MoveEstimates:
        """Return the estimates from timed orders."""
        ends = list(map(float.__add__, timing.starts, problem.durations))
        last = [-timing.starts[order[0]] if objective == "span" and order else 0.0 for order in orders]
        after, to_go = list(last), [0.0] * len(ends)
        ranks, followers, lags, durations = problem.ranks, problem.followers, problem.lags, problem.durations
        for number in reversed(timing.sequence):
            rank = ranks[number]
            rest = after[rank]
            for later in followers[number]:
                rest = max(rest, lags[later] + to_go[later])
            after[rank] = to_go[number] = rest + durations[number]
        return cls(problem, orders, objective, ends, to_go, last)

    def after(self, rank: int, source: int, target: int) -> float:
        """Return the time after the computation at `source` has moved to `target`; infinity for a circle."""
        order, low, high = self.orders[rank], min(source, target), max(source, target)
        if low == 0 and self.objective == "span":
            return 0.0  # the rank's span begins elsewhere, too
        rest, number = order[low : high + 1], order[source]
        rest.remove(number)
        needs, durations = self.problem.needs, self.problem.durations
        if needs[number] in rest if target < source else any(needs[one] == number for one in rest):
            return math.inf
        row = [number, *rest] if target < source else [*rest, number]
        now, ends, lags = self.ends[order[low - 1]] if low else 0.0, dict[int, float](), self.problem.lags
        for one in row:
            needed = needs[one]
            if needed >= 0:
                now = max(now, ends.get(needed, self.ends[needed]) + lags[one])
            now += durations[one]
            ends[one] = now
        after = self.to_go[order[high + 1]] if high + 1 < len(order) else self.last[rank]
        value, to_go, followers = 0.0, dict[int, float](), self.problem.followers
        for one in reversed(row):
            for later in followers[one]:
                after = max(after, lags[later] + to_go.get(later, self.to_go[later]))
            value = max(value, ends[one] + after)
            after += durations[one]
            to_go[one] = after
        return value
