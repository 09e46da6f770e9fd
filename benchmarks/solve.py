"""Solved plans beside the best known times of `benchmarks/instances`, with bounds and times.

    python benchmarks/solve.py [NAME …] [--seconds 60] [--effort 8] [--update]
    python benchmarks/solve.py --long | --random | --jitter | --both-ways | --ilp PATH | --primus DIR [--seconds 60]

`--update` writes better times and bounds into the files, with "quintsched" as who found them. `--ilp` compares with the
zero-bubble authors' integer program instead (`integer_program.py`), `--primus` with the schedules of Primus, `--random`
with named schedules and proofs (`random_orders.py`). `--long` searches long steps with uneven stages, with a placement
of the solver's choice, until they are near their bound. `--jitter` hardens orders against durations that vary.
`--both-ways` compares placements with those in which microbatches go both ways, which hold all weights twice.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from quintsched.files.user_records import read_record
from quintsched.simulation.costs import Costs
from quintsched.solve import Solution, certify, solve
from quintsched.solve.order_search import PlacementSearch

FOLDER = Path(__file__).parent / "instances"
MOST_BYTES = 2**20
SLACK = 1e-9
JITTERS = ("0.1", "0.3", "3%x4")
JITTERED = ((4, 8, "linear", 4), (4, 16, "linear", 6), (8, 16, "linear", 8), (4, 8, "v", 4), (8, 32, "linear", 8))
"""Ranks, microbatches, placement and cap of the problems with durations that vary."""
NEAR = 0.02
"""Gap to the certified bound, the least of all placements, at which the search of a long step ends."""


class Found(BaseModel):
    """Time or bound, and who found it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    by: str


class Instance(BaseModel):
    """Problem of an order: sizes, cap and costs, with the best known time and bound."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["unit", "published", "capped", "heterogeneous", "network", "ways", "mixed"]
    source: str
    """Source of the problem."""
    pp: int
    microbatches: int
    placement: Literal["linear", "loop", "v", "bidirectional"]
    chunks: int = 1
    recompute: Literal["none", "auto"] = "none"
    offload: bool = False
    lend: bool = False
    memory_cap: float | None = None
    """Most activations on a rank, in microbatches of a whole rank."""
    objective: Literal["span", "makespan"] = "span"
    costs: Costs = Costs()
    best_known: Found
    bound: Found
    """Time that no order of this placement can be below, whatever it recomputes, offloads or lends."""

    @property
    def cap_of_bound(self) -> float | None:
        """Cap under which its bound holds: none where activations can be recomputed or moved away."""
        return None if self.kind == "mixed" else self.memory_cap

    def solved(self, effort: int, seconds: float) -> Solution:
        """Return the plan that the solver finds."""
        return solve(
            pp=self.pp,
            microbatches=self.microbatches,
            placement=self.placement,
            chunks=self.chunks if self.placement in ("loop", "v") else None,
            memory_cap=self.memory_cap,
            costs=self.costs,
            recompute=self.recompute,
            offload=self.offload,
            lend=self.lend,
            objective=self.objective,
            effort=effort,
            seconds=seconds,
        )


def instances(names: list[str] | None = None) -> Iterator[tuple[Path, Instance]]:
    """Yield all instances, or those whose file names contain one of the names."""
    for path in sorted(FOLDER.glob("*.json")):
        if not names or any(name in path.stem for name in names):
            yield path, read_record(Instance, path, MOST_BYTES, "the instance")


def updated(instance: Instance, found: Solution) -> Instance:
    """Return an instance with a better time or bound, where the solver has found one."""
    best, bound, claim = instance.best_known, instance.bound, found.certificate
    if claim.value < best.value * (1 - SLACK):
        best = Found(value=claim.value, by=f"quintsched ({found.origin})")
    if instance.kind != "mixed" and claim.bound > bound.value * (1 + SLACK):
        bound = Found(value=claim.bound, by=f"certificate (rank {claim.rank} by {claim.reason})")
    if instance.kind != "mixed" and (found.proved or 0.0) > bound.value * (1 + SLACK):
        bound = Found(value=float(found.proved or 0.0), by="CP-SAT")
    return instance.model_copy(update={"best_known": best, "bound": bound})


def write(path: Path, instance: Instance) -> None:
    """Write an instance."""
    text = json.dumps(instance.model_dump(mode="json", exclude_unset=True), indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def search_long_step(cap: int, seed: int, placement: str, kinds: list[float], seconds: float) -> bool:
    """Print the search of a step of 512 microbatches on 16 ranks; return whether it ended near the bound.

    `kinds` are the times of a forward and of both halves of a backward, in those of the stage.
    """
    rng, began_s, ended_s = random.Random(seed), time.process_time(), list[float]()
    times = tuple(rng.uniform(0.7, 1.5) for _ in range(16))
    forward, half, weight = (tuple(kind * one for one in times) for kind in kinds)
    costs = Costs(forward=forward, backward_input=half, backward_weight=weight)

    search = partial(solve, pp=16, microbatches=512, placement=placement, memory_cap=cap, costs=costs)

    def end_when_near(attempt: PlacementSearch, taken: float, below: float = inf) -> None:
        if attempt.value <= below:
            ended_s[:] = taken, time.process_time() - began_s
            raise KeyboardInterrupt

    bound = min(search(seconds=seconds, told=end_when_near).bounds.values())  # ends at once
    began_s, ended_s = time.process_time(), []
    found = search(seconds=seconds, told=partial(end_when_near, below=bound * (1 + NEAR)))
    certify(found.plan, found.certificate)
    claim, (taken, busy) = found.certificate, ended_s or (seconds, time.process_time() - began_s)
    gap = claim.value / claim.bound - 1
    print(
        f"{cap:3} {seed:5}  {found.placement:9} {claim.value:10g} {claim.bound:11g} {gap:6.2%} "
        f"{taken:8.1f} {busy:8.1f}  {found.origin}",
        flush=True,
    )
    return bool(ended_s)


def harden(pp: int, microbatches: int, placement: str, cap: int, effort: int, seconds: float) -> bool:
    """Print percentiles of the nominal and the hardened order; return whether none of these is worse by over 0.5 %."""
    cells, holds = [], True
    for jitter in JITTERS:
        found = solve(
            pp=pp,
            microbatches=microbatches,
            placement=placement,
            memory_cap=cap,
            jitter=jitter,
            effort=effort,
            seconds=seconds,
        ).robustness
        assert found is not None
        cells.append(f"{found.nominal:7.1f} {found.value:7.1f} {found.closed:4.0%}")
        holds &= found.value <= found.nominal * 1.005
    print(f"{pp:2} {microbatches:4} {placement:6} {cap:4}  {'   '.join(cells)}", flush=True)
    return holds


def compare_both_ways(effort: int, seconds: float) -> None:
    """Print spans at unit costs on 8 ranks, of linear, of a V, and of microbatches that go both ways."""
    for microbatches, cap in product((8, 16), (4, 6, 8)):
        cells = []
        for placement in ("linear", "v", "bidirectional"):
            sizes = {"pp": 8, "microbatches": microbatches, "placement": placement, "memory_cap": cap}
            found = solve(**sizes, effort=effort, seconds=seconds)  # type: ignore[arg-type]
            certify(found.plan, found.certificate)
            bound = max(found.certificate.bound, found.proved or 0.0)
            cells.append(f"{found.certificate.value:5g} {bound:5g} {found.status:13}")
        print(f"{microbatches:12} {cap:4}  {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of instances; default: all")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--effort", type=int, default=8)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--long", action="store_true", help="long steps with uneven stages, until near their bounds")
    parser.add_argument("--placement", default="auto", help="of long steps")
    parser.add_argument("--caps", type=int, nargs="*", default=[8, 16], help="of long steps")
    parser.add_argument("--kinds", default="1,1,1", help="of long steps: forward and both halves, in times of a stage")
    parser.add_argument("--random", action="store_true", help="random problems, beside named schedules and proofs")
    parser.add_argument("--jitter", action="store_true", help="durations that vary")
    parser.add_argument("--both-ways", action="store_true", help="linear, a V, and microbatches that go both ways")
    parser.add_argument("--ilp", type=Path, metavar="PATH", help="auto_schedule.py of the zero-bubble authors")
    parser.add_argument("--primus", type=Path, metavar="DIR", help="a copy of AMD-AGI/Primus")
    options = parser.parse_args()
    if options.long:
        print("cap  seed  placement      found   certified    gap  seconds      CPU  found by")
        kinds = [float(kind) for kind in options.kinds.split(",")]
        cells = [(cap, seed, options.placement, kinds) for cap in options.caps for seed in range(3)]
        near = [search_long_step(*cell, options.seconds) for cell in cells]
        sys.exit(0 if all(near) else 1)
    if options.jitter:
        sys.exit(0 if all(harden(*sizes, options.effort, options.seconds) for sizes in JITTERED) else 1)
    if options.both_ways:
        print("microbatches  cap  linear, bound           v, bound                 bidirectional, bound")
        return compare_both_ways(options.effort, options.seconds)
    if options.random:
        import random_orders

        sys.exit(1 if random_orders.compare(options.effort, options.seconds) else 0)
    if options.ilp is not None:
        import integer_program

        sys.exit(1 if integer_program.compare(options.ilp, options.effort, options.seconds) else 0)
    if options.primus is not None:
        import primus_schedules

        sys.exit(1 if primus_schedules.compare(options.primus, options.effort, options.seconds) else 0)
    print("instance                          best known       bound      found   certified     proved  seconds  status")
    missed, number = 0, 0
    for path, one in instances(options.names):
        began = time.monotonic()
        found = one.solved(options.effort, options.seconds)
        claim, taken = found.certificate, time.monotonic() - began
        missed, number = missed + (claim.value > one.best_known.value * (1 + SLACK)), number + 1
        proved = "-" if found.proved is None else f"{found.proved:g}"
        print(
            f"{path.stem:32} {one.best_known.value:11g} {one.bound.value:11g} {claim.value:10g} {claim.bound:11g} "
            f"{proved:>10} {taken:8.1f}  {found.status}",
            flush=True,
        )
        if options.update:
            write(path, updated(one, found))
    print(f"{number - missed} of {number} at least as good as the best known")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
