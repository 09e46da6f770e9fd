"""Solved orders beside those of the zero-bubble authors' integer program, under its own model of memory.

The program is `megatron/core/pipeline_parallel/auto_schedule.py` in older branches of their repository, such as
`legacy-main`; it needs PuLP (3.3, with its CBC) and torch. `python benchmarks/solve.py --ilp PATH` runs it on 20
instances, 120 s each. Its constraint of memory looks up a cap for each computation, so that a list of as many equal
caps is given. Its order is timed as ours are, where that makes it shorter than it says itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quintsched.simulation.costs import Costs
from quintsched.solve import solve
from quintsched.solve.order_timing import time_orders
from quintsched.solve.search_problem import Problem, problem_of

SLOW_S = 2.0
"""Time from which on the program's times count."""
HELD = 2
"""Units that a microbatch holds; each half of its backward frees one."""


@dataclass(frozen=True)
class Row:
    """Sizes of an instance, in units that are whole numbers, as the program wants them."""

    pp: int
    microbatches: int
    forward: list[int]
    backward_input: list[int]
    backward_weight: list[int]
    message: int
    cap: int

    @property
    def costs(self) -> Costs:
        """Costs of the instance."""
        return Costs(
            forward=tuple(map(float, self.forward)),
            backward_input=tuple(map(float, self.backward_input)),
            backward_weight=tuple(map(float, self.backward_weight)),
            p2p=float(self.message),
            activation_after_input=1 / HELD,
        )

    @property
    def problem(self) -> Problem:
        """Problem of the instance."""
        return problem_of(self.pp, self.microbatches, range(self.pp), self.costs, self.cap)


def rows(count: int = 20, seed: int = 0) -> Iterator[Row]:
    """Yield instances of at most 8 ranks and 24 microbatches: half of them with equal stages, caps from pp on."""
    rng = random.Random(seed)
    for number in range(count):
        pp = rng.choice((2, 3, 4, 6, 8))
        one = [rng.randint(8, 14), rng.randint(8, 14), rng.randint(5, 12)]
        spread = 1.0 if number % 2 else 1.3
        forward, half, weight = ([round(time * rng.uniform(1, spread)) for _ in range(pp)] for time in one)
        microbatches, message, cap = min(24, rng.randint(pp, 3 * pp)), rng.choice((0, 1)), rng.randint(pp, 2 * pp)
        yield Row(pp, microbatches, forward, half, weight, message, cap)


def program_of(path: Path) -> Any:
    """Return the authors' module; it moves a matrix to a GPU, which here stays where it is."""
    spec = importlib.util.spec_from_file_location("auto_schedule", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["auto_schedule"] = module
    spec.loader.exec_module(module)
    if not torch.cuda.is_available():
        torch.Tensor.cuda = torch.Tensor.cpu  # type: ignore[method-assign,assignment]
    return module


def program_value(module: Any, row: Row) -> tuple[float | None, float]:
    """Return the span that the program finds (None: none in its time), and the seconds of its solver."""
    each = [1] * row.pp
    nodes = 3 * row.pp * row.microbatches
    config = module.GraphConfig(
        mem_f=[HELD * one for one in each],
        mem_b=[-one for one in each],
        mem_w=[-one for one in each],
        max_mem=[HELD * row.cap] * nodes,
        cost_f=row.forward,
        cost_b=row.backward_input,
        cost_w=row.backward_weight,
        cost_comm=row.message,
    )
    graph = module.Graph.build_graph(row.pp, row.microbatches, config)
    with silence():
        program, _, ends, _ = module.build_ilp(graph)
        began = time.monotonic()
        module.solve_ilp(program)
    taken = time.monotonic() - began
    if program.sol_status not in (1, 2):
        return None, taken
    stated = float(module.pulp.value(program.objective))
    order = sorted(range(nodes), key=lambda number: (module.pulp.value(ends[number]), number))
    orders = [[number for number in order if graph.get_stage(number) == rank] for rank in range(row.pp)]
    timing = time_orders(row.problem, orders)
    return min(stated, max(timing.spans)) if timing else stated, taken


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard what this process and its solver print."""
    sys.stdout.flush()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        kept = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def compare(path: Path, effort: int, seconds: float) -> int:
    """Print both on all instances; return how often ours is worse."""
    module, worse, ratios = program_of(path), 0, []
    print("pp  microbatches  cap   program  seconds      ours   to its value  certified")
    for row in rows():
        theirs, taken = program_value(module, row)
        found = solve(
            pp=row.pp,
            microbatches=row.microbatches,
            placement="linear",
            memory_cap=row.cap,
            costs=row.costs,
            effort=effort,
            seconds=seconds,
        )
        value, least = found.certificate.value, float("inf") if theirs is None else theirs + 1e-6
        until = next((at for at, reached, _, _ in found.log if reached <= least), None)
        worse += until is None
        if taken > SLOW_S and until is not None:
            ratios.append(taken / until)
        said = "none" if theirs is None else f"{theirs:g}"
        reached = "never" if until is None else f"{until:.3f} s"
        print(
            f"{row.pp:2} {row.microbatches:13} {row.cap:4} {said:>9} {taken:8.1f} {value:9g} {reached:>14} "
            f"{found.certificate.bound:10g}",
            flush=True,
        )
    if ratios:
        print(f"where it takes over {SLOW_S:g} s ({len(ratios)}): {statistics.median(ratios):.0f} times faster, median")
    print(f"ours is worse on {worse}")
    return worse
