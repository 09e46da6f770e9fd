"""Activations that ranks hold over time, in a simulated or a measured run.

held     ┌──┐  ┌────      from the start of a forward to the end of its backward
      ┌──┘  └──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quintsched.ir.dataflow_analysis import Operands, Value, ValueKind
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulated_activation_memory import HELD_FOR_OTHERS, held_by, held_kinds
from quintsched.simulation.simulator import TimedRun

ROUNDING = 1e-9
"""Fraction of the makespan within which times count as equal, because of rounding."""


@dataclass(frozen=True)
class HeldActivations:
    """Activations that one rank holds over time: `amounts[i]`, in microbatches of a whole rank, from `times[i]` on."""

    rank: int
    times: tuple[float, ...]
    amounts: tuple[float, ...]
    peak: float


def flows_of_ranks(run: TimedRun) -> list[list[Operands]]:
    """Return the data flow of each span's instruction."""
    flows, columns = run.plan.flows, run.plan.columns
    ranks = range(columns.num_ranks)
    return run.plan.remember("flows of ranks", lambda: [flows.of_rows(columns.rows_of(rank)) for rank in ranks])


def held_activations(run: TimedRun, costs: Costs) -> tuple[HeldActivations, ...]:
    """Return the activations of each rank, from the start of a forward to the end of its backward; () if none."""
    plan, changes = run.plan, list[list[tuple[float, float]]]()
    shape = (len(plan.stage_to_pp), plan.schedule.num_units)
    stages, units = np.indices(shape).reshape(2, -1)
    kinds = (*held_kinds(plan), *HELD_FOR_OTHERS)
    held = {k: held_by(plan, costs, k, stages, units).reshape(shape).tolist() for k in kinds}

    def amount(value: Value) -> float:
        found: float = held[value.kind][value.stage][value.number]
        return found

    for row, flows in zip(run.timeline, flows_of_ranks(run), strict=True):
        of_rank: list[tuple[float, float]] = []
        for span, used in zip(row, flows, strict=True):
            of_rank += [(span.end, -amount(value)) for value in used.consumes if value.kind in kinds]
            for value in used.produces:
                if value.kind in kinds:  # the remains of an input half replace its inputs at its end
                    of_rank.append((span.end if value.kind is ValueKind.PENDING else span.start, amount(value)))
        changes.append(sorted(of_rank, key=lambda change: change[0]))
    if not any(changes):
        return ()
    instant = run.makespan * ROUNDING
    return tuple(_add_up(rank, of_rank, plan.schedule.parts, instant) for rank, of_rank in enumerate(changes))


def _add_up(rank: int, changes: Sequence[tuple[float, float]], units: int, instant: float) -> HeldActivations:
    """Return the running sum of changes; changes less than `instant` apart are merged into one step."""
    at, now, peak = 0.0, 0.0, 0.0
    after = {at: now}
    for time, change in changes:
        at = time if time - at > instant else at
        now += change
        peak = max(peak, now)
        after[at] = now
    return HeldActivations(rank, tuple(after), tuple(amount / units for amount in after.values()), peak / units)
