"""Search for an order with a small 95th percentile, from orders that are good without noise.

    samples   ▕ to improve orders ▏▕ to choose among them ▏▕ to judge the chosen one ▏      none is used twice

Orders are annealed on the mean of the worst tenth of the first samples, which varies less than a percentile. The second
samples choose among the improvements; the nominal order is kept unless another one is better there.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from quintsched.ir.instruction_columns import Amounts
from quintsched.solve.list_policies import policies, schedule_by
from quintsched.solve.noise.duration_samples import Jitter, Samples, percentile
from quintsched.solve.order_annealing import critical_path, random_move
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_search import interrupted_at
from quintsched.solve.order_timing import has_room, timed
from quintsched.solve.search_problem import Orders, Problem, lower_bound

IMPROVING, CHOOSING, JUDGING = 128, 400, 1000
"""Samples of each purpose."""
BOUNDED = 200
"""Judging samples, the slowest ones, for which the bound of any order is computed; others only have the work."""
MOVES, POLICIES = 4000, 50
"""Moves and list schedules for an effort of 1."""
WORST = 0.1
"""Share of the samples whose mean is minimised."""
HOT, COLD = 2e-3, 1e-4
KEPT = 12
"""Improvements among which is chosen: the last ones."""
CHOICE = ((1 + KEPT) * CHOOSING + JUDGING) / JUDGING
"""Time to choose and to judge, in units of that to judge one order."""


@dataclass(frozen=True)
class Robustness:
    """95th percentiles over the judging samples: of the order (`value`), of the one that was found without regard to
    noise (`nominal`), and a bound on that of any order."""

    jitter: str
    value: float
    nominal: float
    bound: float

    @property
    def closed(self) -> float:
        """Share of the gap between the nominal order and the bound that is closed."""
        gap = self.nominal - self.bound
        return (self.nominal - self.value) / gap if gap > 0 else 0.0


def harden(
    problem: Problem, orders: Orders, objective: Objective, jitter: Jitter, *, seed: int, effort: int, ends_s: float
) -> tuple[Orders, Robustness]:
    """Return an order with a smaller 95th percentile, or the given one; an interrupt ends the search.

    The given order and the bound are judged first, which shows how much time to keep free for the choice.
    """
    run = _RobustSearch(problem, objective, jitter, random.Random(seed), ends_s)
    improving, choosing, judging = (
        Samples.draw(problem, jitter, number, (seed, purpose))
        for purpose, number in enumerate((IMPROVING, CHOOSING, JUDGING))
    )
    found, began_s = [orders], monotonic()
    values = run.values(judging, orders)
    run.ends_s -= CHOICE * (monotonic() - began_s)
    nominal, bound = percentile(values), run.bound(judging, values)
    if monotonic() < run.ends_s:
        with suppress(KeyboardInterrupt), interrupted_at(run.ends_s):
            run.improve(improving, found, effort)
    if len(found) == 1:
        return orders, Robustness(jitter.text, nominal, nominal, bound)
    best = min((orders, *found[-KEPT:]), key=lambda one: percentile(run.values(choosing, one)))
    return best, Robustness(jitter.text, percentile(run.values(judging, best)), nominal, bound)


@dataclass
class _RobustSearch:
    problem: Problem
    objective: Objective
    jitter: Jitter
    rng: random.Random
    ends_s: float

    def values(self, samples: Samples, orders: list[list[int]] | Orders) -> Amounts:
        values = samples.values(orders, self.objective)
        assert values is not None, "these orders have run before"
        return values

    def bound(self, samples: Samples, values: Amounts) -> float:
        """Return the 95th percentile of lower bounds of any order; `values` are those of one order.

        Takes at most half of the time that is left: bounds of the slowest samples come first.
        """
        until_s = (monotonic() + self.ends_s) / 2
        ranks = np.array(self.problem.ranks)
        bounds = np.max([samples.durations[ranks == rank].sum(axis=0) for rank in range(self.problem.pp)], axis=0)
        for sample in np.argsort(values)[: -BOUNDED - 1 : -1].tolist():
            if monotonic() > until_s or self.problem.halves:  # of whole backwards, samples have no halves to bound by
                break
            bounds[sample] = lower_bound(self._problem_of(samples, sample), self.objective).value
        return percentile(bounds)

    def _problem_of(self, samples: Samples, sample: int) -> Problem:
        durations, leads = (tuple(table[:, sample].tolist()) for table in (samples.durations, samples.leads))
        return replace(self.problem, durations=durations, leads=leads)

    def improve(self, samples: Samples, found: list[Orders], effort: int) -> None:
        """Append orders, each better than those before: list schedules under samples, then annealed ones."""
        best = _worst(samples.values(found[0], self.objective))
        starts, every = [found[0]], policies(self.problem, self.rng)
        for sample in range(POLICIES * effort):
            if monotonic() > self.ends_s:
                return
            problem = self.problem if sample % 2 else self._problem_of(samples, sample % IMPROVING)
            orders = schedule_by(problem, next(every))
            if orders is None or not all(has_room(self.problem, rank, order) for rank, order in enumerate(orders)):
                continue
            value = _worst(samples.values(orders, self.objective))
            if value < best:
                best = value
                found.append(tuple(map(tuple, orders)))
                starts = [*starts[:1], found[-1]]
        for start in starts:
            self._anneal(samples, start, found, MOVES * effort // len(starts))

    def _anneal(self, samples: Samples, start: Orders, found: list[Orders], moves: int) -> None:
        orders = [list(order) for order in start]
        value, path = self._state(samples, orders)
        best = min(value, _worst(samples.values(found[-1], self.objective)))
        for step in range(moves):
            if monotonic() > self.ends_s or value == 0:
                return
            temperature = value * HOT * (COLD / HOT) ** (step / moves)
            rank, source, target = random_move(orders, path, self.rng)
            order = orders[rank]
            if source == target:
                continue
            number = order.pop(source)
            order.insert(target, number)
            values = samples.values(orders, self.objective) if has_room(self.problem, rank, order) else None
            after = _worst(values)
            if after > value and self.rng.random() >= math.exp((value - after) / temperature):
                order.pop(target)
                order.insert(source, number)
                continue
            value, path = self._state(samples, orders)
            if value < best:
                best = value
                found.append(tuple(map(tuple, orders)))

    def _state(self, samples: Samples, orders: list[list[int]]) -> tuple[float, list[tuple[int, int]]]:
        """Return the mean of the worst, and the critical path of one of them."""
        values = self.values(samples, orders)
        worst = np.argsort(values)[-max(1, round(WORST * len(values))) :]
        problem = self._problem_of(samples, int(self.rng.choice(worst.tolist())))
        return _worst(values), critical_path(problem, orders, timed(problem, orders), self.objective)


def _worst(values: Amounts | None) -> float:
    """Return the mean of the worst tenth; infinity for an order that cannot run."""
    if values is None:
        return math.inf
    return float(np.sort(values)[-max(1, round(WORST * len(values))) :].mean())
