"""How a plan's gradients are exchanged: by the library's own collectives, or spelled out, and then by which mini-plan.

native          none: gloo's or NCCL's own
ring, tree      one mini-plan per collective and number of ranks
auto            several; the closed forms of `timing` say which is the fastest for a message's size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quintsched.collectives.program import CollectivePlan, Kind
from quintsched.collectives.spelling import spell
from quintsched.collectives.timing import TREE_CHOICES, spelled_seconds
from quintsched.ir.communication import Means, Wire

Call = tuple[Kind, int]
"""A collective, and over how many ranks."""


@dataclass(frozen=True)
class Communication:
    """The means by which buckets are exchanged, and the mini-plans (by name) that spell it out."""

    means: Means = "native"
    plans: Mapping[str, CollectivePlan] = field(default_factory=dict)
    wire: Wire = field(default_factory=Wire)
    """What "auto" reckons with; the others do not look at it."""

    @classmethod
    def of(cls, means: Means, calls: Iterable[Call], wire: Wire) -> Communication:
        """Return the mini-plans for these calls.

        Raises `UsageError` where no rank has a partner, or the means cannot do a collective.
        """
        plans = [plan for kind, size in sorted(set(calls)) for plan in _spelled(means, kind, size)]
        return cls(means, {name_of(plan): plan for plan in plans}, wire)

    def candidates(self, kind: Kind, size: int) -> tuple[CollectivePlan, ...]:
        """The mini-plans of a collective over so many ranks."""
        return tuple(plan for plan in self.plans.values() if (plan.kind, plan.size) == (kind, size))

    def choose(self, kind: Kind, size: int, num_bytes: float) -> CollectivePlan | None:
        """Return the mini-plan for a collective of so many bytes, all in all; None: the library's own."""

        def rank(plan: CollectivePlan) -> tuple[float, str]:
            return spelled_seconds(kind, plan.algorithm, size, plan.chunks, num_bytes, self.wire), name_of(plan)

        return min(self.candidates(kind, size), key=rank, default=None)


NATIVE = Communication()


def name_of(plan: CollectivePlan) -> str:
    """Return what a plan file calls a mini-plan: "all_reduce-4-tree-8"."""
    return f"{plan.kind}-{plan.size}-{plan.algorithm}-{plan.chunks}"


def _spelled(means: Means, kind: Kind, size: int) -> list[CollectivePlan]:
    match means:
        case "native":
            return []
        case "auto":
            trees = TREE_CHOICES if kind == "all_reduce" else ()
            return [spell(kind, "ring", size), *(spell(kind, "tree", size, chunks) for chunks in trees)]
        case algorithm:
            return [spell(kind, algorithm, size)]
