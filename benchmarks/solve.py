"""Solved plans beside the best known spans under a memory cap, with bounds and times.

    python benchmarks/solve.py [--seconds 60] [--effort 8]

The spans are the published or proved ones of each instance; see `INSTANCES`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

from quintsched.simulation.costs import Costs
from quintsched.solve import solve


@dataclass(frozen=True)
class Instance:
    """Sizes, cap, and the best span known before this solver; `heuristic` is that of the zero-bubble heuristics."""

    pp: int
    microbatches: int
    placement: str
    cap: float
    best: float
    heuristic: float | None = None
    costs: Costs = field(default_factory=Costs)


MEASURED = Costs(unit="200 us", forward=92.61, backward_input=90.43, backward_weight=46.685, p2p=3.005)
INSTANCES = (
    Instance(4, 8, "linear", 2, 41.0, 51.0),
    Instance(4, 8, "linear", 3, 31.0, 37.0),
    Instance(8, 16, "linear", 6, 61.0, 107.0),
    Instance(8, 16, "linear", 8, 55.0, 55.0),
    Instance(8, 24, "linear", 7, 6890.0, 10111.145, MEASURED),
    Instance(8, 16, "v", 6, 53.5),
    Instance(8, 16, "v", 5, 56.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--effort", type=int, default=8)
    options = parser.parse_args()
    print("pp   m  placement  cap   heuristic  best known      found   certified  proved by CP-SAT  seconds  status")
    missed = 0
    for one in INSTANCES:
        began = time.monotonic()
        found = solve(
            pp=one.pp,
            microbatches=one.microbatches,
            placement=one.placement,
            memory_cap=one.cap,
            costs=one.costs,
            effort=options.effort,
            seconds=options.seconds,
        )
        claim, taken = found.certificate, time.monotonic() - began
        missed += claim.value > one.best * (1 + 1e-9)
        heuristic = "-" if one.heuristic is None else f"{one.heuristic:g}"
        proved = "-" if found.proved is None else f"{found.proved:g}"
        print(
            f"{one.pp:2} {one.microbatches:3}  {one.placement:9} {one.cap:4g} {heuristic:>11} {one.best:11g} "
            f"{claim.value:10g} {claim.bound:11g} {proved:>17} {taken:8.1f}  {found.status}",
            flush=True,
        )
    print(f"{len(INSTANCES) - missed} of {len(INSTANCES)} at least as good as the best known")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
