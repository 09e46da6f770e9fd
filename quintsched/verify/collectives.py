"""Which collectives a plan calls, the pass that spells them out, and what is wrong with a plan that does not fit them.

AllReduceBucket(stage=0, bucket=0, axes=dp+cp) on mesh dp=2,pp=2,cp=2  ──▶  all_reduce over 4 ranks: one ring of all 4
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quintsched.collectives.choice import Call, Communication
from quintsched.collectives.program import MAX_SIZE, Kind
from quintsched.errors import UsageError
from quintsched.ir.communication import Wire, find_means
from quintsched.ir.instructions import Instruction
from quintsched.verify.diagnostics import Finding

if TYPE_CHECKING:
    from quintsched.plan import Plan

BUCKET_KINDS: dict[str, Kind] = {
    "AllReduceBucket": "all_reduce",
    "ReduceScatterBucket": "reduce_scatter",
    "AllGatherBucket": "all_gather",
}
"""What each instruction on a gradient bucket asks of the replicas, by its name in a plan file."""


def calls_of(plan: Plan) -> set[Call]:
    """Return the collectives over replicas that a plan's instructions call."""
    buckets = {(i.op, _axes(i)) for program in plan.programs for i in program if i.op in BUCKET_KINDS}
    return {(BUCKET_KINDS[op], math.prod(map(plan.mesh.axis_size, axes))) for op, axes in buckets}


def _axes(bucket: Instruction) -> tuple[str, ...]:
    axes: tuple[str, ...] = getattr(bucket, "axes", ())
    return axes


def spell_out(plan: Plan, means: str, wire: Wire | None = None) -> Plan:
    """Add the mini-plans by which a plan's buckets are exchanged; "auto" may leave it as it is: see `stays_native`.

    Raises `UsageError` for unknown means, and for a ring or a tree where no gradient is summed over replicas.
    """
    found, calls = find_means(means), calls_of(plan)
    if found == "native" or (found == "auto" and stays_native(calls)):
        return plan
    if not calls:
        raise UsageError(
            f"{found} over an axis of size 1: on mesh {plan.mesh} no gradient is summed over replicas; leave "
            "communication native"
        )
    return replace(plan, communication=Communication.of(found, calls, wire or Wire()))


def stays_native(calls: set[Call]) -> bool:
    """Whether "auto" leaves these to the library: nothing is exchanged, or among more ranks than can be spelled out."""
    return not calls or max(size for _, size in calls) > MAX_SIZE


def communication_faults(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with the mini-plans of a plan, but for what `check` proves."""
    communication, calls = plan.communication, calls_of(plan)
    if communication.means == "native" and communication.plans:
        yield "collectives are spelled out, but communication is native; leave them out, or say ring, tree or auto"
    if communication.means != "native":
        for kind, size in sorted(calls):
            if not communication.candidates(kind, size):
                yield f"communication is {communication.means}, but no collective spells out {kind} over {size} ranks"
    for name, mini in communication.plans.items():
        if (mini.kind, mini.size) not in calls:
            yield f"collective {name!r} is {mini.kind} over {mini.size} ranks, which no instruction calls"
        if communication.means in ("ring", "tree") and mini.algorithm != communication.means:
            yield f"collective {name!r} is a {mini.algorithm}, but communication is {communication.means}"


def broken_collectives(plan: Plan) -> Iterator[Finding]:
    """Yield what is not sound about the mini-plans; the findings name their ranks, those of an axis, in words only."""
    for name, mini in plan.communication.plans.items():
        for finding in mini.check().findings:
            yield Finding(finding.point, f"collective {name!r}: {finding.message}")
