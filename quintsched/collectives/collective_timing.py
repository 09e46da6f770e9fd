"""Timing of a collective: a message takes latency + bytes / bandwidth; a rank sends and receives one at a time.

    ring         2(n-1) · (latency + bytes/n / bandwidth)                            half of it for each half
    tree         2(fill + period·(K/2-1)) · (latency + bytes/K / bandwidth)          K > 2 chunks; see `double_tree`
    native       2⌈log2 n⌉ · latency + 2(n-1)/n · bytes / bandwidth                  a bound: no algorithm beats it

`simulate` times the events of the proof under these costs. Additions of received chunks cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quintsched.collectives.collective_program import Algorithm, CollectiveKind, CollectiveProgram
from quintsched.collectives.collective_proof import event_graph, prove
from quintsched.collectives.spelled_out import num_steps
from quintsched.errors import UnsoundError, UsageError
from quintsched.ir.communication import LARGEST_FIGURE, Wire

TREE_CHOICES = (2, 4, 8, 16, 32)
"""Numbers of chunks among which "auto" chooses for a tree, by message size."""


@dataclass(frozen=True)
class CollectiveRun:
    """Timed collective, in seconds: `start` and `end` have one entry per message of the plan."""

    plan: CollectiveProgram
    num_bytes: float
    wire: Wire
    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Time at which the last message has arrived, in seconds."""
        return max(self.end, default=0.0)

    @cached_property
    def sent_bytes(self) -> tuple[float, ...]:
        """Bytes sent by each rank."""
        counts = np.bincount([sent.rank for sent, _ in self.plan.messages], minlength=self.plan.size)
        return tuple((counts * self.num_bytes / self.plan.chunks).tolist())

    @property
    def bandwidth_use(self) -> float:
        """Lower bound on any algorithm's time at this bandwidth (without latency), as a fraction of the makespan."""
        least = least_bytes(self.plan.kind, self.plan.size, self.num_bytes) / self.wire.bandwidth
        return least / self.makespan if self.makespan else 0.0

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON data."""
        return {
            "bytes": self.num_bytes,
            "latency_s": self.wire.latency_s,
            "bandwidth": self.wire.bandwidth,
            "makespan_s": self.makespan,
            "sent_bytes": list(self.sent_bytes),
            "bandwidth_use": self.bandwidth_use,
        }


def simulate(plan: CollectiveProgram, num_bytes: float, wire: Wire) -> CollectiveRun:
    """Time a collective on `num_bytes` of data in all; raises `UnsoundError` if it is not sound."""
    if not 0 <= num_bytes <= LARGEST_FIGURE:
        raise UsageError(f"there is no collective of {num_bytes!r} bytes")
    prove(plan).raise_if_unsound()
    seconds = wire.seconds(num_bytes / plan.chunks)
    graph = event_graph(plan)
    run = graph.run_events()
    if not run.finished:
        raise UnsoundError(f"{plan.title} cannot finish")
    starts = graph.starts(np.full(len(plan.messages), seconds), np.array(run.order))
    return CollectiveRun(plan, num_bytes, wire, tuple(starts.tolist()), tuple((starts + seconds).tolist()))


def least_bytes(kind: CollectiveKind, size: int, num_bytes: float) -> float:
    """Return the lower bound on bytes sent by the busiest rank, for any algorithm (Patarasu, Yuan 2009)."""
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size * num_bytes


def spelled_seconds(
    kind: CollectiveKind, algorithm: Algorithm, size: int, chunks: int, num_bytes: float, wire: Wire
) -> float:
    """Return the closed form of a mini-plan's time: number of steps in sequence x time per step."""
    return num_steps(kind, algorithm, size, chunks) * wire.seconds(num_bytes / chunks)


def native_seconds(kind: CollectiveKind, size: int, num_bytes: float, wire: Wire) -> float:
    """Return a lower bound on the time of the library's collective: fewest steps and fewest bytes at once."""
    steps = (2 if kind == "all_reduce" else 1) * math.ceil(math.log2(size))
    return steps * wire.latency_s + least_bytes(kind, size, num_bytes) / wire.bandwidth


def fastest_tree_seconds(size: int, num_bytes: float, wire: Wire, choices: Iterable[int] = TREE_CHOICES) -> float:
    """Return the time of an all-reduce by tree with the best number of chunks."""
    return min(spelled_seconds("all_reduce", "tree", size, chunks, num_bytes, wire) for chunks in choices)


def crossover_bytes(size: int, wire: Wire) -> float:
    """Return the bytes above which an all-reduce is faster by ring than by tree; infinite if it never is."""
    low, high = 0.0, 2.0**60

    def ring_wins(num_bytes: float) -> bool:
        ring = spelled_seconds("all_reduce", "ring", size, size, num_bytes, wire)
        return ring < fastest_tree_seconds(size, num_bytes, wire)

    if ring_wins(low) or not ring_wins(high):
        return 0.0 if ring_wins(low) else math.inf
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if ring_wins(middle) else (middle, high)
    return high
