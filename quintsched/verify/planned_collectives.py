"""Collectives over replicas that a plan calls, and faults of its spelled-out collectives.

AllReduceBucket(stage=0, bucket=0, axes=dp+cp) on mesh dp=2,pp=2,cp=2  ──▶  all_reduce over 4 ranks: one ring of all 4
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from quintsched.collectives.collective_program import MAX_SIZE
from quintsched.collectives.collective_proof import prove
from quintsched.collectives.gradient_exchange import CollectiveCall, candidates
from quintsched.errors import counted
from quintsched.ir.collective_means_and_wire import MEANS
from quintsched.ir.diagnostics import Finding
from quintsched.ir.instruction_set import ALL
from quintsched.ir.plan_data import PlanData


def calls_of(plan: PlanData) -> set[CollectiveCall]:
    """Return the kinds and group sizes of the collectives over replicas that a plan's instructions call."""
    columns, found = plan.columns, set[CollectiveCall]()
    for kind in ALL:
        if kind.on_bucket is not None:
            rows = columns.rows_where(kind)
            distinct = np.unique(columns.column("axes")[rows], return_index=True)[1]
            for axes in columns.values("axes", rows[distinct]):
                found.add((kind.on_bucket, math.prod(map(plan.mesh.axis_size, axes))))
    return found


def stays_native(calls: set[CollectiveCall]) -> bool:
    """Return whether "auto" keeps these native: there are none, or a group is too large to be spelled out."""
    return not calls or max(size for _, size in calls) > MAX_SIZE


def communication_faults(plan: PlanData) -> Iterator[str]:
    """Yield the mismatches between a plan's calls and its mini-plans, without the proof of the mini-plans."""
    communication, calls = plan.communication, calls_of(plan)
    if communication.means == "native" and communication.plans:
        means = ", ".join(sorted({*MEANS} - {"native"}))
        yield f"collectives are spelled out, but communication is native; leave them out, or say one of {means}"
    if communication.means != "native":
        for kind, size in sorted(calls):
            if not candidates(communication, kind, size):
                yield f"communication is {communication.means}, but no collective spells out {kind} over {size} ranks"
    for name, mini in communication.plans.items():
        if (mini.kind, mini.size) not in calls:
            yield f"collective {name!r} is {mini.kind} over {counted(mini.size, 'rank')}, which no instruction calls"
        if communication.means not in ("native", "auto") and mini.algorithm != communication.means:
            yield f"collective {name!r} is a {mini.algorithm}, but communication is {communication.means}"


def broken_collectives(plan: PlanData) -> Iterator[Finding]:
    """Yield the findings of the mini-plans' proofs; only their messages name ranks, those of the axis."""
    for name, mini in plan.communication.plans.items():
        for finding in prove(mini).findings:
            yield Finding(finding.point, f"collective {name!r}: {finding.message}")
