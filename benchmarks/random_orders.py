"""Solved orders of random problems: small ones beside what CP-SAT proves, others beside all named schedules that fit.

`python benchmarks/solve.py --random` draws 100 small problems (2 or 3 ranks, at most 4 microbatches) and 200 others
(2 to 8 ranks, at most 4 microbatches for each), with unlike stages and kinds, and caps from half of the ranks on.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from quintsched.schedules.kit.stage_placements import linear, v
from quintsched.simulation.costs import Costs
from quintsched.solve import Solution, certify, solve
from quintsched.solve.order_timing import has_room, time_orders
from quintsched.solve.search_problem import problem_of
from quintsched.solve.starting_orders import named_orders

SMALL, OTHERS, TOLERANCE = 100, 200, 1e-9
EFFORT_OF_PROOF, SECONDS_OF_PROOF = 4, 60.0
"""Least effort and seconds for small problems, which CP-SAT needs for its proofs."""


@dataclass(frozen=True)
class Row:
    """Sizes and costs of a random problem."""

    pp: int
    microbatches: int
    placement: str
    cap: int
    costs: Costs

    @classmethod
    def drawn(cls, seed: int, *, is_small: bool) -> Row:
        """Return the problem of a seed: small ones take whole numbers of units, for which CP-SAT can prove a time."""
        rng = random.Random(seed)
        pp = rng.randint(2, 3) if is_small else rng.randint(2, 8)
        microbatches = rng.randint(2, 4) if is_small else rng.randint(pp, 4 * pp)
        placement, stages = rng.choice((("linear", pp), ("v", 2 * pp)))
        forward, half, weight = (
            tuple(float(rng.randint(5, 10)) if is_small else rng.uniform(0.7, 1.5) for _ in range(stages))
            for _ in range(3)
        )
        message = rng.randint(0, 1) * (1.0 if is_small else 0.1)
        costs = Costs(forward=forward, backward_input=half, backward_weight=weight, p2p=message)
        return cls(pp, microbatches, placement, rng.randint(math.ceil(pp / 2), pp), costs)

    def solved(self, effort: int, seconds: float) -> Solution:
        """Return the plan that the solver finds, with its certificate verified."""
        found = solve(
            pp=self.pp,
            microbatches=self.microbatches,
            placement=self.placement,
            memory_cap=self.cap,
            costs=self.costs,
            effort=effort,
            seconds=seconds,
        )
        certify(found.plan, found.certificate)
        return found

    def named(self) -> float:
        """Return the least time of a named schedule that keeps to the cap; infinity where none does."""
        placed = linear(self.pp, 1) if self.placement == "linear" else v(self.pp, 2)
        problem, least = problem_of(self.pp, self.microbatches, placed, self.costs, self.cap), math.inf
        for name, orders in named_orders(problem, self.costs):
            if name != "blocks of a V" and all(has_room(problem, rank, order) for rank, order in enumerate(orders)):
                timing = time_orders(problem, orders)
                least = min(least, timing.value("span") if timing else math.inf)
        return least


def compare(effort: int, seconds: float) -> int:
    """Print how the search does on both kinds of problems; return on how many it misses."""
    limits = max(effort, EFFORT_OF_PROOF), max(seconds, SECONDS_OF_PROOF)
    small = [Row.drawn(seed, is_small=True).solved(*limits).status for seed in range(SMALL)]
    optimal = [status for status in small if status != "open"]
    print(f"small: optimal in {len(optimal)} of {SMALL}, {optimal.count('certified')} of them certified", flush=True)
    shorter = worse = alone = 0
    gaps = []
    for seed in range(OTHERS):
        row = Row.drawn(seed, is_small=False)
        found, named = row.solved(effort, seconds), row.named()
        value = found.certificate.value
        alone += named == math.inf
        shorter += value < named * (1 - TOLERANCE)
        worse += value > named * (1 + TOLERANCE)
        gaps.append(value / found.certificate.bound - 1)
    print(
        f"others: shorter than each named schedule that fits in {shorter} of {OTHERS} (none fits in {alone}), longer "
        f"in {worse}; gap to the certified bound {statistics.mean(gaps):.1%}, median {statistics.median(gaps):.1%}"
    )
    return SMALL - len(optimal) + worse
