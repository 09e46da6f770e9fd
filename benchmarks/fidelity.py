"""Fidelity of the simulator: every schedule, run against its own simulation. Is communication hidden as predicted?

    python benchmarks/fidelity.py [--only sleeps|links|reductions|gloo] [--schedules 1f1b,zbv] [--json]

    sleeps   four ranks as threads; every computation sleeps for 20 ms, every message takes 5 ms: within 3 %
    links    the same with microbatches from half to twice as long, and messages from 2 to 25 ms, by pair of ranks
    reductions   two replicas of two ranks, stages of four blocks that sleep for 10 ms, and of four buckets, each
             reduced in 16 ms as soon as the last backward has filled it: within 3 %
    gloo     two processes that really compute; a step is simulated with the costs of a trace
             of the one before: within 5 %

    simulated   F0 ▸▸ F1 ▸▸ F2           ▸▸ a message, hidden behind computation wherever the plan allows it
    measured    F0 ▸▸ F1 ·▸▸ F2          ·  here it was not, or another cost took time

Sleeps isolate the schedule: any time beyond the simulation is software overhead, or a wait that the simulator
misses. A machine wakes late, so the same blocks first sleep by themselves, without an engine, in as many threads: the
simulation has the median of what they take (`nominal`: what they were asked for). As nothing makes a sleep shorter,
the best step counts; of the real computations, the median. Where a schedule is beyond its limit, the computations are
listed that began later than their predecessors explain. The exit code is then 1. Where the system allows it, the
sleeping threads get real-time priority: they need hardly any CPU time, but at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fidelity_rows import Row, find_slips, report
from paired import run_processes
from sleeper import Pace, Sleeper, urgently
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, connect, run_local
from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.comm import Rules
from quintsched.trace.measured_trace import Trace

MICROBATCHES = 8
SLICES = 2
BUCKETS = 4
"""Buckets, and blocks, of a stage in the part `reductions`."""
ALONE = 10
"""Passes of a block that sleeps by itself."""
LENGTHS = (1.0, 0.5, 2.0, 1.0, 1.5, 0.5, 1.0, 0.5)
"""Lengths of the microbatches in the part `links`."""
NODE = 2
"""Ranks per node there."""
WITHIN_MS, ACROSS_MS = 2.0, 12.0
OTHERS_MS = {(2, 3): 25.0, (3, 2): 5.0}
"""Latency of messages within a node, across nodes, and between particular ranks."""
Spans = list[tuple[float, float]]
"""Begin and end of each step on one rank, in seconds on a clock that all ranks share."""


def compile_for(schedule: qs.Schedule, pp: int, costs: qs.Costs | None = None) -> qs.Plan:
    """Return a plan of a schedule, with its fewest chunks, and with slices if it supports them."""
    return qs.compile(
        schedule,
        mesh=qs.Mesh(pp=pp),
        microbatches=MICROBATCHES,
        slices=min(schedule.max_slices, SLICES),
        costs=costs if schedule.searches else None,
    )


def took_ms(by_rank: Sequence[Spans]) -> list[float]:
    """Return the duration of each step, from the first rank's begin to the last one's end."""
    return [
        1e3 * (max(end for _, end in together) - min(begin for begin, _ in together))
        for together in zip(*by_rank, strict=True)
    ]


def timed(engine: Engine, step: Callable[[], object]) -> tuple[float, float]:
    """Run a step that all ranks begin together; return its begin and end on this one."""
    engine.everyone.barrier()
    begin = time.perf_counter()
    step()
    return begin, time.perf_counter()


# Sleeps.


@dataclass(frozen=True)
class Sleeps:
    """A schedule in which every computation sleeps for so many milliseconds, on so many ranks.

    The first steps, and some later ones, have collectives more: ranks compare their data and weights.
    """

    schedule: qs.Schedule
    pp: int = 4
    computation_ms: float = 20.0
    wire_ms: float = 5.0
    steps: int = 9
    lengths: tuple[float, ...] = (1.0,) * MICROBATCHES
    collective_ms: float = 0.0
    block: ClassVar[type[Sleeper]] = Sleeper
    blocks_per_stage: ClassVar[int] = 1
    bucket_mb: ClassVar[float] = 25.0

    @property
    def host_bandwidth(self) -> float | None:
        """Bandwidth of copies of activations to the host's memory and back, in bytes a second; None: no delay."""
        return None

    def costs(self) -> qs.Costs:
        return self._costs(p2p=self.wire_ms)

    def wire_s(self) -> float | dict[tuple[int, int], float]:
        """Return the latency of the transport's messages."""
        return self.wire_ms / 1e3

    def _costs(self, **more: Any) -> qs.Costs:
        parts = self.schedule.min_chunks * min(self.schedule.max_slices, SLICES)
        each = self.computation_ms * parts
        return qs.Costs(unit="ms", forward=each, backward_input=each, backward_weight=each, **more)

    def plan(self) -> qs.Plan:
        return compile_for(self.schedule, self.pp, self.costs())

    def alone_ms(self, transport: Transport) -> float:
        """Return the median time of one computation where a rank runs nothing but this case's block."""
        seconds = self.computation_ms / self.blocks_per_stage / 1e3
        block, given = self.block(Pace(seconds, seconds, seconds)), torch.ones(1, 1, requires_grad=True)
        moments = [time.perf_counter()]
        for _ in range(ALONE):
            block(given).backward(torch.ones(1, 1))  # sleeps three times: forward, and both halves
            moments.append(time.perf_counter())
        passes = [end - begin for begin, end in pairwise(moments)]
        return 1e3 / 3 * statistics.median(passes) * self.blocks_per_stage

    def trained(self) -> qs.Plan:
        """Return the plan of the engine, which trains; schedules for evaluation run by its `evaluate`."""
        plan = self.plan()
        return plan if plan.mode == "train" else qs.compile("gpipe", mesh=plan.mesh, microbatches=MICROBATCHES)

    def run(self, directory: Path, transport: Transport) -> Spans:
        """Run the steps on one rank after one that warms up, and examines blocks; save a trace of training steps."""
        plan, seconds = self.trained(), self.computation_ms / self.blocks_per_stage / 1e3
        num_blocks = len(plan.routes[0].stages) * self.blocks_per_stage
        engine = Engine(
            plan,
            [partial(self.block, Pace(seconds, seconds, seconds))] * num_blocks,
            lambda output, _: output.sum(),
            partial(torch.optim.SGD, lr=0.0),
            block_costs=[1.0] * num_blocks,
            bucket_mb=self.bucket_mb,
            prove="none",  # blocks that only sleep have artificial gradients
            trace_steps=range(1, 1 + self.steps),
            transport=transport,
        )
        batch = torch.tensor(self.lengths)[:, None].repeat(1, SLICES)
        step = engine.step if self.schedule.mode == "train" else engine.evaluate
        step(batch / 100, batch)  # in which units are short, as the examination of a loss runs many
        spans = [timed(engine, partial(step, batch, batch)) for _ in range(self.steps)]
        engine.save_trace(directory)
        return spans


@dataclass(frozen=True)
class Links(Sleeps):
    """Sleeps with latencies and microbatches that differ."""

    lengths: tuple[float, ...] = LENGTHS

    def costs(self) -> qs.Costs:
        links = [{"source": s, "destination": d, "latency": took} for (s, d), took in OTHERS_MS.items()]
        wires = {
            "nodes": [rank // NODE for rank in range(self.pp)],
            "within": {"latency": WITHIN_MS},
            "across": {"latency": ACROSS_MS},
            "links": links,
        }
        return self._costs(p2p=wires, microbatches=self.lengths)

    def wire_s(self) -> float | dict[tuple[int, int], float]:
        ranks = range(self.pp)
        by_node = {(s, d): WITHIN_MS if s // NODE == d // NODE else ACROSS_MS for s in ranks for d in ranks}
        return {pair: took / 1e3 for pair, took in (by_node | OTHERS_MS).items()}


@dataclass(frozen=True)
class Reductions(Sleeps):
    """Sleeps of few microbatches on two replicas; a bucket takes as long to reduce as any other collective."""

    pp: int = 2
    computation_ms: float = 40.0
    collective_ms: float = 16.0
    lengths: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    zero: int = 0
    buckets: int = BUCKETS
    """Buckets of a stage in the plan; the runtime divides them by bytes, so that each block has its own."""
    blocks_per_stage: ClassVar[int] = BUCKETS
    bucket_mb: ClassVar[float] = 1e-6

    def costs(self) -> qs.Costs:
        chunks = self.schedule.min_chunks
        each = self.collective_ms * BUCKETS * chunks
        return self._costs(
            p2p=self.wire_ms,
            reduce_scatter=each,
            all_gather=each if self.zero else 0.0,
            clip=self.collective_ms,
            pieces=BUCKETS / self.buckets,
        )

    def plan(self) -> qs.Plan:
        mesh = qs.Mesh(dp=2, pp=self.pp)
        return qs.compile(
            self.schedule, mesh=mesh, microbatches=len(self.lengths), buckets_per_stage=self.buckets, zero=self.zero
        )


REDUCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", {}),
    ("1f1b", {"buckets": 1}),
    ("1f1b", {"zero": 1}),
    ("1f1b", {"zero": 2}),
    ("zb-h1", {}),
    ("zb-h1", {"zero": 2}),
    ("interleaved-1f1b", {}),
)
"""Cases of the part `reductions`."""


def run_sleeps(case: Sleeps, limit: float = 0.03, rules: Rules = "mailbox") -> Row:
    """Run a plan of sleeps in process, and compare its best step with the simulation of what its blocks take alone."""
    plan, collective_s = case.plan(), case.collective_ms / 1e3
    with TemporaryDirectory() as folder, urgently():
        alone_ms = statistics.median(run_local(plan.mesh.size, case.alone_ms))
        simulation = plan.simulate(replace(case, computation_ms=alone_ms).costs())
        wire_s, host_bandwidth, run = case.wire_s(), case.host_bandwidth, partial(case.run, Path(folder))
        spans = run_local(
            plan.mesh.size,
            run,
            rules=rules,
            wire_s=wire_s,
            collective_s=collective_s,
            host_bandwidth=host_bandwidth,
        )
        measured = took_ms(spans)
        slips = []
        if plan.mode == "train":
            trace = Trace.load(Path(folder), plan)
            slips = find_slips(simulation, trace.step(min(trace.steps, key=trace.makespan)))
    return Row(
        case.schedule.name, simulation.makespan, min(measured), limit, slips, plan.simulate(case.costs()).makespan
    )


# Computations.

LENGTH, HIDDEN, WIDE, BLOCKS = 128, 256, 2048, 4


class FeedForward(nn.Sequential):
    """A block that works on each position by itself: it takes slices, and needs no past."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN))

    def forward(self, given: Tensor, past: Past | None = None) -> Tensor:
        first, activation, second = self
        output: Tensor = second(activation(first(given)))
        return output


def run_gloo(rank: int, folder: str, names: Sequence[str], rounds: int) -> dict[str, Spans]:
    """Run all schedules in turn, two steps each: one traced, and one timed."""
    transport = connect("gloo", timeout_s=60)
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, MICROBATCHES, LENGTH, HIDDEN)
    engines = {
        schedule.name: Engine(
            compile_for(schedule, 2),
            [FeedForward] * BLOCKS,
            nn.functional.mse_loss,
            partial(torch.optim.SGD, lr=1e-3),
            block_costs=[1.0] * BLOCKS,
            trace_steps=range(2, 2 + 2 * rounds, 2),
            transport=transport,
        )
        for schedule in chosen(names)
    }
    spans: dict[str, Spans] = {name: [] for name in engines}
    for _ in range(1 + rounds):
        for name, engine in engines.items():
            spans[name] += [timed(engine, partial(engine.step, inputs, targets)) for _ in range(2)]
    for name, engine in engines.items():
        engine.save_trace(Path(folder, name))
    return {name: times[3::2] for name, times in spans.items()}


def compare_gloo(names: Sequence[str], rounds: int, limit: float = 0.05) -> list[Row]:
    """Compare each timed step with the simulation under the costs of the step before; the median round counts."""
    rows = []
    with TemporaryDirectory() as folder:
        by_rank = run_processes(run_gloo, 2, folder, names, rounds, timeout_s=600)
        for schedule in chosen(names):
            trace = Trace.load(Path(folder, schedule.name), compile_for(schedule, 2))
            measured = took_ms([spans[schedule.name] for spans in by_rank])
            found = [row_of(only_step(trace, number), took, limit) for number, took in enumerate(measured)]
            rows.append(sorted(found, key=lambda row: row.ratio)[(rounds - 1) // 2])
    return rows


def row_of(trace: Trace, measured_ms: float, limit: float) -> Row:
    """Compare a measured step with the simulation under the costs of another one, which was traced."""
    simulation = qs.simulate(trace.plan, trace.costs())
    slips = find_slips(simulation, trace.step())
    return Row(trace.plan.schedule.name, simulation.makespan, measured_ms, limit, slips)


def only_step(trace: Trace, number: int) -> Trace:
    """Return the trace of the `number`-th recorded step alone."""
    own = slice(number, number + 1)
    ranks = [
        replace(rank, steps=rank.steps[own], start=rank.start[own], end=rank.end[own], wait=rank.wait[own])
        for rank in trace.ranks
    ]
    return Trace(trace.plan, tuple(ranks))


def chosen(names: Sequence[str]) -> list[qs.Schedule]:
    """Return the training schedules of these names."""
    return [schedule for schedule in qs.all_schedules() if schedule.name in names and schedule.mode == "train"]


def main() -> int:
    schedules = {schedule.name: schedule for schedule in qs.all_schedules()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["sleeps", "links", "reductions", "gloo"], help="run one part")
    parser.add_argument("--schedules", default=",".join(schedules), help="these only, separated by commas")
    parser.add_argument("--rounds", type=int, default=10, help="traced and timed steps of each schedule over gloo")
    parser.add_argument("--json", action="store_true", help="rows as JSON to standard output, tables to standard error")
    options = parser.parse_args()
    names = options.schedules.split(",")
    if not set(names) <= set(schedules) or options.rounds < 1:
        parser.error(f"schedules are {', '.join(schedules)}; a round is at least 1")
    torch.set_num_threads(1)
    found: dict[str, list[Row]] = {}
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        if options.only in (None, "sleeps"):
            title = "sleeps of 20 ms, messages of 5 ms, 4 ranks in process: ms a step"
            found["sleeps"] = report(title, (run_sleeps(Sleeps(schedules[name])) for name in names))
        if options.only in (None, "links"):
            title = "microbatches of 10 to 40 ms, messages of 2 to 25 by pair of ranks, 4 ranks in process: ms a step"
            found["links"] = report(title, (run_sleeps(Links(schedules[name])) for name in names))
        if options.only in (None, "reductions"):
            title = "four blocks of 10 ms and buckets of 16 to a stage, two replicas, 4 ranks in process: ms a step"
            cases = [Reductions(schedules[name], **more) for name, more in REDUCTIONS if name in names]
            found["reductions"] = report(title, map(run_sleeps, cases))
        if options.only in (None, "gloo"):
            title = "two gloo processes, costs from a trace of the step before: ms a step"
            found["gloo"] = report(title, iter(compare_gloo(names, options.rounds)))
    if options.json:
        print(json.dumps({part: [asdict(row) for row in rows] for part, rows in found.items()}, indent=1))
    return 0 if all(row.is_within for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
