"""Traces made up from simulations: what a run would leave that goes exactly as simulated, but for what is asked for."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import quintsched as qs
from quintsched.ir.instruction_set import ClipGrad, HoldAct, HostCopy, OptStep, ReclaimAct, Recv
from quintsched.trace.measured_trace import MeasuredStep, Trace
from quintsched.trace.trace_json import RankTrace, digest_of

EPOCH_S = 1.7e9
COSTS = qs.Costs(unit="ms", forward=10.0, backward_input=9.0, backward_weight=8.0, p2p=0.5, optimizer=4.0, clip=2.0)

Spans = list[tuple[float, float, float]]


def spans_of(simulation: qs.Simulation, pp_rank: int, gap: float = 0.0) -> Spans:
    """(start, end, wait) of a pp rank's instructions, in the simulation's unit of time.

    Each instruction starts when the one before has handed over, and waits until it can run, for one message after the
    other; `gap` is how long before the next one's start it ends.
    """
    row = simulation.timeline[pp_rank]
    plan = simulation.plan
    flows = plan.flows.of_rows(plan.columns.rows_of(pp_rank))
    arrivals = {
        used.produces[0]: span.end for used, span in zip(flows, row, strict=True) if isinstance(span.instruction, Recv)
    }
    at, spans, taken = 0.0, {}, {}
    for index, span in enumerate(row):
        if isinstance(span.instruction, HostCopy | HoldAct | ReclaimAct):
            spans[index] = (span.start, span.end, 0.0)
            continue
        if not (span.instruction.computes or isinstance(span.instruction, ClipGrad | OptStep)):
            spans[index] = (at, at, 0.0)
            continue
        now = at
        for value in flows[index].consumes:
            begun, now = now, max(now, arrivals.get(value, now))
            taken[value] = (now, now - begun)
        spans[index] = (at, max(span.end - gap, span.start), span.start - at)
        at = span.end
    for index, span in enumerate(row):
        if isinstance(span.instruction, Recv) and flows[index].produces[0] in taken:  # loans are held unused
            end, wait = taken[flows[index].produces[0]]
            spans[index] = (min(spans[index][0], end - wait), end, wait)
    return [spans[index] for index in range(len(row))]


def rank_traces(
    simulation: qs.Simulation, scales: Sequence[float] = (1.0,), gap: float = 0.0, jitter: float = 0.0, seed: int = 0
) -> Iterator[RankTrace]:
    """One trace per global rank; step k (from 2 on) is slower by `scales[k]`, ends vary by `jitter` of their spans."""
    plan, random = simulation.plan, np.random.default_rng(seed)
    for rank in range(plan.mesh.size):
        pp_rank = plan.mesh.pp_rank(rank)
        start, end, wait = np.array(spans_of(simulation, pp_rank, gap)).reshape(-1, 3).T / 1000
        steps = []
        for number, scale in enumerate(scales):
            late = EPOCH_S + number * 3 * simulation.makespan / 1000
            noise = (end - start - wait) * random.uniform(-jitter, 0, len(start))
            steps.append((start * scale + late, (end + noise) * scale + late, wait * scale))
        times = (np.stack(part) for part in zip(*steps, strict=True))
        yield RankTrace(digest_of(plan), rank, pp_rank, tuple(range(2, 2 + len(scales))), *times)


def write_trace(directory: Path, simulation: qs.Simulation, **how: object) -> Trace:
    """Write what `rank_traces` yields, and read it back."""
    for of_rank in rank_traces(simulation, **how):  # type: ignore[arg-type]
        of_rank.save_rank(directory)
    return Trace.load(directory, simulation.plan)


def measured(
    directory: Path, name: str = "1f1b", mesh: str = "pp=3", *, jitter: float = 0.0, **how: object
) -> tuple[qs.Simulation, MeasuredStep]:
    """Return the simulation of a plan, and a step of it that was slower by a fifth."""
    simulation = qs.compile(name, mesh=mesh, microbatches=4, **how).simulate(COSTS)  # type: ignore[arg-type]
    return simulation, write_trace(directory, simulation, scales=(1.2,), jitter=jitter).step()
