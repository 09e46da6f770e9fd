"""Timing of a collective: a message takes latency + bytes / bandwidth; a rank sends and receives one at a time.

    ring         2(n-1) · (latency + bytes/n / bandwidth)                            half of it for each half
    tree         2(fill + period·(K/2-1)) · (latency + bytes/K / bandwidth)    K > 2 chunks; see `double_tree_algorithm`
    two-level    2((n-g) · inside + (g-1) · between)          g nodes; the time of a message of bytes/n inside, between
    native       2⌈log2 n⌉ · latency + 2(n-1)/n · bytes / bandwidth                  a bound: no algorithm beats it

With several nodes, a step of a ring or a tree over all ranks takes as long as its messages between nodes. `simulate`
times the events of the proof under these costs. Additions of received chunks cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quintsched.collectives.collective_program import Algorithm, CollectiveKind, CollectiveProgram
from quintsched.collectives.collective_proof import event_graph, prove
from quintsched.collectives.expand_collective import num_steps
from quintsched.collectives.two_level_algorithm import two_level_steps
from quintsched.errors import UnsoundError, UsageError
from quintsched.graph.event_graph import Times
from quintsched.ir.collective_means_and_wire import LARGEST_FIGURE, Wire

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
        least = least_seconds(self.plan.kind, self.plan.size, self.num_bytes, self.wire)
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
    seconds = _message_seconds(plan, num_bytes / plan.chunks, wire)
    graph = event_graph(plan)
    run = graph.run_events()
    if not run.finished:
        raise UnsoundError(f"{plan.title} cannot finish")
    starts = graph.starts(seconds, np.array(run.order))
    return CollectiveRun(plan, num_bytes, wire, tuple(starts.tolist()), tuple((starts + seconds).tolist()))


def _message_seconds(plan: CollectiveProgram, num_bytes: float, wire: Wire) -> Times:
    """Return the time of each message: inside a node, or between two."""
    ends = np.array([(sent.rank, received.rank) for sent, received in plan.messages], np.int64).reshape(-1, 2)
    first, second = (ends * wire.nodes // plan.size).T
    return np.where(first == second, wire.node_seconds(num_bytes), wire.seconds(num_bytes))


def least_bytes(kind: CollectiveKind, size: int, num_bytes: float) -> float:
    """Return the lower bound on bytes sent by the busiest rank, for any algorithm (Patarasu, Yuan 2009)."""
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size * num_bytes


def least_seconds(kind: CollectiveKind, size: int, num_bytes: float, wire: Wire) -> float:
    """Return the lower bound on any algorithm's time, without latency: of what a rank sends, and a node's ranks."""
    fastest = max(wire.bandwidth, wire.node_bandwidth if wire.nodes > 1 else 0.0)
    between = least_bytes(kind, wire.nodes, num_bytes) * wire.nodes / size / wire.bandwidth
    return max(least_bytes(kind, size, num_bytes) / fastest, between)


def spelled_seconds(
    kind: CollectiveKind, algorithm: Algorithm, size: int, chunks: int, num_bytes: float, wire: Wire
) -> float:
    """Return the closed form of a mini-plan's time: number of steps in sequence x time per step.

    On several nodes, that of a tree is an upper bound: each of its steps is taken to cross a node's border.
    """
    message = num_bytes / chunks
    if algorithm == "two-level":
        inside, between = two_level_steps(kind, size, chunks, wire.nodes)
        return inside * wire.node_seconds(message) + between * wire.seconds(message)
    return num_steps(kind, algorithm, size, chunks) * wire.seconds(message)


def native_seconds(kind: CollectiveKind, size: int, num_bytes: float, wire: Wire) -> float:
    """Return a lower bound on the time of the library's collective: fewest steps and fewest bytes at once."""
    passes, steps = 2 if kind == "all_reduce" else 1, math.ceil(math.log2(size))
    between = math.ceil(math.log2(wire.nodes)) if wire.nodes > 1 else steps
    latency_s = between * wire.latency_s + (steps - between) * wire.node_latency_s
    return passes * latency_s + least_seconds(kind, size, num_bytes, wire)


def fastest_tree_seconds(size: int, num_bytes: float, wire: Wire, choices: Iterable[int] = TREE_CHOICES) -> float:
    """Return the time of an all-reduce by tree with the best number of chunks."""
    return min(spelled_seconds("all_reduce", "tree", size, chunks, num_bytes, wire) for chunks in choices)


def crossover_bytes(size: int, wire: Wire, algorithm: Algorithm = "ring") -> float:
    """Return the bytes above which an all-reduce is faster by rings than by tree; infinite if it never is."""
    low, high = 0.0, 2.0**60

    def rings_win(num_bytes: float) -> bool:
        rings = spelled_seconds("all_reduce", algorithm, size, size, num_bytes, wire)
        return rings < fastest_tree_seconds(size, num_bytes, wire)

    if rings_win(low) or not rings_win(high):
        return 0.0 if rings_win(low) else math.inf
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if rings_win(middle) else (middle, high)
    return high
