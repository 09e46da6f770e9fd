"""zb-auto (Qi et al. 2023, arXiv:2401.10241): search for the best greedy order under given costs and a memory cap.

The paper's ZB-1p and ZB-2p are this search with `--memory-cap p` and `2p`. A cap of P gives ZB-H1 or better; from 2P-1
on, no rank is idle within its span if F = I = W. The default cap is 2P. Below P, ranks do what the memory allows:

rank 0  F0 F1 .  .  .  .  .  I0 W0 F2 I1 W1 F3 …             P=4, cap 2
rank 3  .  .  .  F0 I0 F1 I1 W0 W1 .  .  .  .  .  F2 …

Candidates run in simulated time, the most promising first, up to a budget of simulated passes. The shortest span
wins, then the shortest makespan, then the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from quintsched.errors import UsageError
from quintsched.ir.instruction_columns import Amounts
from quintsched.schedules.kit.greedy_scheduling_by_costs import (
    ListSchedule,
    Manner,
    PerStage,
    Workload,
    schedule_greedily,
)
from quintsched.schedules.kit.registry import Order, Shape, schedule

SLOPES = (1.0, 2.1, 0.65, 0.8, 0.0, 1.65, 2.2, 0.5, 0.9, 1.3, 1.8, 0.3, 0.7, 1.1, 1.5)
"""Candidates for the lead of each rank over the next: 1 is 1F1B, 2 fills the pipeline; less suits tight memory."""
HABITS = ((0.0, 1.0), (0.0, 0.0), (0.5, 1.0), (0.0, 0.25), (0.5, 0.0))
"""Candidates for (early_forward, early_weight) of `Manner`."""
MOST_PASSES, FEWEST_CANDIDATES = 100_000, 8
"""Budget of the search: it stops after this many passes, but not before this many candidates."""


def room_for_one(shape: Shape) -> str | None:
    """a memory cap of at least one microbatch"""
    least = max(map(max, _per_stage(shape, "activation") + _per_stage(shape, "activation_after_input")))
    if shape.memory_cap is None or shape.memory_cap >= least:
        return None
    return f"the memory cap is {shape.memory_cap}, but one microbatch holds {least}; the nearest that works: {least}"


@schedule(
    "zb-auto",
    summary="the best greedy order under given costs and a memory cap (ZB-1p, ZB-2p)",
    bubble="searched",
    memory="the memory cap, or min(2P, M)",
    searches=True,
    constraint=room_for_one,
)
def zb_auto(rank: int, shape: Shape) -> Order:
    """Yield this rank's order in the best candidate."""
    if len(shape.stages_of(rank)) != 1 or len(shape.stage_to_pp) != shape.pp:
        raise UsageError(f"zb-auto: stages lie on {shape.stage_to_pp}; it plans for one stage on each rank")
    yield from _best(shape).orders[shape.stages_of(rank)[0]]


@lru_cache(maxsize=2)
def _best(shape: Shape) -> ListSchedule:
    """Return the best outcome of all candidates; the first one is eager, so that at least one always finishes."""
    work, best, looked_at = _work(shape), None, 0
    for count, manner in enumerate(_manners(work)):
        if count >= FEWEST_CANDIDATES and looked_at >= MOST_PASSES:
            break
        found = schedule_greedily(work, manner, best.span if best else math.inf)
        looked_at += work.num_passes
        if found and (best is None or _merit(found) < _merit(best)):
            best = found
    assert best is not None
    return best


def _manners(work: Workload) -> Iterator[Manner]:
    """Yield the candidates, the most promising first: slopes that fill the pipeline, or that the cap has room for."""
    capped = (work.cap / (max(map(max, work.activation)) or math.inf) - 1) / max(len(work.forward) - 1, 1)
    for slope in dict.fromkeys((2.0, min(capped, 2.0), *SLOPES)):
        yield from (Manner(slope, *habit) for habit in HABITS)
        yield Manner(slope, strict=True)


def _merit(outcome: ListSchedule) -> tuple[float, float, float]:
    return round(outcome.span, 9), round(outcome.makespan, 9), outcome.peak


def _work(shape: Shape) -> Workload:
    after = _per_stage(shape, "activation_after_input")
    held = tuple(tuple(map(max, *both)) for both in zip(_per_stage(shape, "activation"), after, strict=True))
    most = 2 * shape.pp if shape.memory_cap is None else shape.microbatches
    return Workload(
        forward=_per_stage(shape, "forward", "exchange"),
        backward_input=_per_stage(shape, "backward_input", "exchange_backward"),
        backward_weight=_per_stage(shape, "backward_weight"),
        activation=held,
        after_input=after,
        send_activation=_messages(shape),
        send_gradient=_messages(shape, back=True),
        cap=min(math.inf if shape.memory_cap is None else shape.memory_cap, most * max(map(max, held))),
    )


def _per_stage(shape: Shape, *names: str) -> PerStage:
    """Return the sum of these costs, per stage and microbatch."""
    stages, units = np.indices((len(shape.stage_to_pp), shape.num_units)).reshape(2, -1)
    shape.costs.check_fits(shape, len(shape.stage_to_pp), shape.pp)
    added: Amounts = np.add.reduce([shape.costs.of_units(name, stages, units, shape) for name in names])
    return _by_stage(added, len(shape.stage_to_pp))


def _messages(shape: Shape, *, back: bool = False) -> PerStage:
    """Return the travel time of the output of each stage but the last (or, with `back`, of its gradient)."""
    stages, units = np.indices((len(shape.stage_to_pp) - 1, shape.num_units)).reshape(2, -1)
    ranks = np.array(shape.stage_to_pp)
    ends = (ranks[stages + 1], ranks[stages]) if back else (ranks[stages], ranks[stages + 1])
    return _by_stage(shape.costs.message_times(stages, units, *ends, shape), len(shape.stage_to_pp) - 1)


def _by_stage(values: Amounts, num_stages: int) -> PerStage:
    return tuple(map(tuple, values.reshape(num_stages, -1).tolist())) if num_stages else ()
