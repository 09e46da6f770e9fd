"""Choice of the gradient exchange: the library's own collectives, or mini-plans that spell them out in messages.

native          no mini-plans: gloo's or NCCL's own
ring, tree, two-level      one mini-plan per collective and group size
auto            several; the closed forms of `collective_timing` choose the fastest by message size
"""

from __future__ import annotations

from collections.abc import Iterable

from quintsched.collectives.collective_program import CollectiveKind, CollectiveProgram
from quintsched.collectives.collective_timing import TREE_CHOICES, spelled_seconds
from quintsched.collectives.expand_collective import has_two_levels, spelled
from quintsched.ir.collective_means_and_wire import Communication, Means, Wire

CollectiveCall = tuple[CollectiveKind, int]
"""(kind of collective, number of ranks)."""


def spelled_out(means: Means, calls: Iterable[CollectiveCall], wire: Wire) -> Communication:
    """Return the communication setting with the mini-plans for these calls.

    Raises `UsageError` for a group of one rank, and if the means cannot do a collective.
    """
    plans = [plan for kind, size in sorted(set(calls)) for plan in _spelled(means, kind, size, wire.nodes)]
    return Communication(means, {name_of(plan): plan for plan in plans}, wire)


def candidates(communication: Communication, kind: CollectiveKind, size: int) -> tuple[CollectiveProgram, ...]:
    """Return the mini-plans of a collective over `size` ranks."""
    return tuple(plan for plan in communication.plans.values() if (plan.kind, plan.size) == (kind, size))


def choose(communication: Communication, kind: CollectiveKind, size: int, num_bytes: float) -> CollectiveProgram | None:
    """Return the fastest mini-plan for a collective of `num_bytes` in all; None for the library's own."""

    def rank(plan: CollectiveProgram) -> tuple[float, str]:
        seconds = spelled_seconds(kind, plan.algorithm, size, plan.chunks, num_bytes, communication.wire)
        return seconds, name_of(plan)

    return min(candidates(communication, kind, size), key=rank, default=None)


def name_of(plan: CollectiveProgram) -> str:
    """Return the name of a mini-plan in a plan file: "all_reduce-4-tree-8"."""
    return f"{plan.kind}-{plan.size}-{plan.algorithm}-{plan.chunks}"


def _spelled(means: Means, kind: CollectiveKind, size: int, nodes: int) -> list[CollectiveProgram]:
    match means:
        case "native":
            return []
        case "auto":
            trees = TREE_CHOICES if kind == "all_reduce" else ()
            levels = [spelled(kind, "two-level", size, nodes=nodes)] if has_two_levels(size, nodes) else []
            return [spelled(kind, "ring", size), *levels, *(spelled(kind, "tree", size, chunks) for chunks in trees)]
        case algorithm:
            return [spelled(kind, algorithm, size, nodes=nodes)]
