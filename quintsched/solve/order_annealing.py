"""Local search: computations on a critical path move within their ranks' orders, by simulated annealing.

    rank 1   F2 B0 [F3 B1 W0] F4 …       a block of the critical path: its first or last computation moves across
                                         others, so that what waits for the block, or what it waits for, goes first

A move that breaks a cap or closes a circle is dropped; one that lengthens the step is kept with falling probability
(Kirkpatrick et al. 1983; moves on critical blocks: Nowicki and Smutnicki 1996). Ranks cannot run out of
memory, as a cap depends on a rank's own order alone.

    rank 1   … W0 [F3 B1 W1] F4 …      F3 goes behind W1: starts of B1, W1, F3 follow from what comes in from other
                  [B1 W1 F3]           ranks, and their ends from what goes out; all other computations keep theirs

So the longest path through the computations that change places is the least time after a move (Taillard 1994; Balas and
Vazacopoulos 1998). It may be too long only where a path leaves these computations and comes back to them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quintsched.solve.order_problem import Objective
from quintsched.solve.order_timing import Timing, has_room, time_orders, timed
from quintsched.solve.search_problem import Problem

FARTHEST = 8
"""Most computations that a move jumps over."""
HOT, COLD = (4e-3, 1e-3), 1e-4
"""First temperatures, which take turns, and the last one, as shares of the value."""


def anneal(
    problem: Problem,
    orders: list[list[int]],
    objective: Objective,
    rng: random.Random,
    *,
    hot: float,
    moves: int,
    ends_s: float,
    found: Callable[[list[list[int]], float], bool],
) -> None:
    """Improve orders; `found` takes each that is the best so far, and returns whether to go on.

    Args:
        problem: the problem.
        orders: orders that keep to all caps.
        objective: what is minimised.
        hot: first temperature, as a share of the value.
        rng: source of all decisions: equal seeds give equal results, as long as time does not run out.
        moves: number of moves that are tried.
        ends_s: moment (of `time.monotonic`) at which the search ends in any case.
        found: called with orders and value.
    """
    orders = [list(order) for order in orders]
    timing = timed(problem, orders)
    value = best = timing.value(objective)
    path = critical_path(problem, orders, timing, objective)
    estimates = MoveEstimates.of(problem, orders, timing, objective)
    for step in range(moves):
        if monotonic() > ends_s:
            return
        temperature = value * hot * (COLD / hot) ** (step / moves)
        rank, source, target = random_move(orders, path, rng)
        most = value + problem.tick - temperature * math.log(1 - rng.random())
        if source == target or estimates.after(rank, source, target) > most:
            continue
        order = orders[rank]
        number = order.pop(source)
        order.insert(target, number)
        moved = time_orders(problem, orders) if has_room(problem, rank, order) else None
        if moved is None or moved.value(objective) > most:
            order.pop(target)
            order.insert(source, number)
            continue
        value = moved.value(objective)
        path = critical_path(problem, orders, moved, objective)
        estimates = MoveEstimates.of(problem, orders, moved, objective)
        if value < best - problem.tick:
            best = value
            if not found(orders, value):
                return


def random_move(orders: list[list[int]], path: list[tuple[int, int]], rng: random.Random) -> tuple[int, int, int]:
    """Return rank, place and new place of a computation on the critical path."""
    rank, place = path[rng.randrange(len(path))]
    return rank, place, min(max(place + random_jump(rng), 0), len(orders[rank]) - 1)


def random_jump(rng: random.Random) -> int:
    """Return the number of places by which a computation moves, to the left if negative."""
    far = 1 if rng.random() < 0.4 else rng.randint(1, FARTHEST)
    return -far if rng.random() < 0.5 else far


def critical_path(
    problem: Problem, orders: list[list[int]], timing: Timing, objective: Objective
) -> list[tuple[int, int]]:
    """Return (rank, place) of the computations of a critical path, from the end to the beginning."""
    starts, durations = timing.starts, problem.durations
    ends = [starts[order[-1]] + durations[order[-1]] for order in orders]
    values = ends if objective == "makespan" else timing.spans
    rank = max(range(problem.pp), key=values.__getitem__)
    place = len(orders[rank]) - 1
    places: dict[int, int] = {}
    path = []
    while True:
        path.append((rank, place))
        number = orders[rank][place]
        start, needed = starts[number], timing.sources[number]
        if place:
            before = orders[rank][place - 1]
            if starts[before] + durations[before] >= start - problem.tick:
                place -= 1
                continue
        if needed < 0:
            return path
        rank = problem.ranks[needed]
        place = places.get(needed, -1)
        if place < 0:
            places |= {other: at for at, other in enumerate(orders[rank])}
            place = places[needed]


@dataclass(frozen=True)
class MoveEstimates:
    """Times of orders, as far as estimates of moves need them.

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
        ranks, followers, delays, durations = problem.ranks, problem.followers, problem.delays, problem.durations
        for number in reversed(timing.sequence):
            rank = ranks[number]
            rest = after[rank]
            for later in followers[number]:
                rest = max(rest, delays[later] + to_go[later])
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
        now, ends, delays = self.ends[order[low - 1]] if low else 0.0, dict[int, float](), self.problem.delays
        for one in row:
            needed = needs[one]
            if needed >= 0:
                now = max(now, ends.get(needed, self.ends[needed]) + delays[one])
            now += durations[one]
            ends[one] = now
        after = self.to_go[order[high + 1]] if high + 1 < len(order) else self.last[rank]
        value, to_go, followers = 0.0, dict[int, float](), self.problem.followers
        for one in reversed(row):
            for later in followers[one]:
                after = max(after, delays[later] + to_go.get(later, self.to_go[later]))
            value = max(value, ends[one] + after)
            after += durations[one]
            to_go[one] = after
        return value
