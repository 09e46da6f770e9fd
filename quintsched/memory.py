"""What stands on a rank at its fullest: activations, and received messages that nobody has taken yet."""

from __future__ import annotations

from quintsched.costs import Costs
from quintsched.dataflow import Flows, Kind, Value
from quintsched.instructions import Recv
from quintsched.plan import Plan


def peak_activations(plan: Plan, flows: Flows, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of `activation` costs, in microbatches of a whole rank at unit costs.

    An activation is held from its forward to the end of its backward.
    """
    chunks = plan.schedule.chunks
    held = [costs.of_chunk("activation", stage, chunks) for stage in range(len(plan.stage_to_pp))]
    peaks = []
    for flows_of_rank in flows:
        now = peak = 0.0
        for flow in flows_of_rank:
            now += sum(held[value.stage] for value in flow.produces if value.kind is Kind.SAVED)
            peak = max(peak, now)
            now -= sum(held[value.stage] for value in flow.consumes if value.kind is Kind.SAVED)
        peaks.append(peak / chunks)
    return tuple(peaks)


def peak_receives(plan: Plan, flows: Flows) -> tuple[int, ...]:
    """Return the most messages that each pp rank has received, in program order, and not yet taken."""
    peaks = []
    for program, flows_of_rank in zip(plan.programs, flows, strict=True):
        standing: set[Value] = set()
        peak = 0
        for instruction, flow in zip(program, flows_of_rank, strict=True):
            standing.difference_update(flow.consumes)
            if isinstance(instruction, Recv):
                standing.update(flow.produces)
                peak = max(peak, len(standing))
        peaks.append(peak)
    return tuple(peaks)
