"""Spell out the collectives of gradient buckets in messages: one mini-plan for each kind and size that is called."""

from __future__ import annotations

from dataclasses import replace

from quintsched.collectives.gradient_exchange import spelled_out
from quintsched.errors import UsageError
from quintsched.ir.collective_means_and_wire import Wire, find_means
from quintsched.ir.plan_data import PlanData
from quintsched.verify.planned_collectives import calls_of, stays_native


def spell_out(plan: PlanData, means: str, wire: Wire | None = None) -> PlanData:
    """Add the mini-plans by which a plan's buckets are exchanged; "auto" may keep the native ones: see `stays_native`.

    Raises `UsageError` for unknown means, and for ring or tree if no gradient is summed over replicas.
    """
    found, calls = find_means(means), calls_of(plan)
    if found == "native" or (found == "auto" and stays_native(calls)):
        return plan
    if not calls:
        raise UsageError(
            f"{found} over an axis of size 1: on mesh {plan.mesh} no gradient is summed over replicas; leave "
            "communication native"
        )
    return replace(plan, communication=spelled_out(found, calls, wire or Wire()))
