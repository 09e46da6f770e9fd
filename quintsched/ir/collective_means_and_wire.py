"""Means of gradient exchange between replicas, and the latency-bandwidth cost of a message on the wire.

Imports almost nothing: requests use these names, and `quintsched --help` imports the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from quintsched.errors import UsageError, suggest

Means = Literal["native", "ring", "tree", "two-level", "auto"]
MEANS: tuple[Means, ...] = get_args(Means)


LARGEST_FIGURE = 1e100
"""Upper bound on seconds, bytes, and bytes per second of a message, so that sums of their times stay finite."""


def find_means(name: str) -> Means:
    """Return the `Means` of this name; raises `UsageError`."""
    for means in MEANS:
        if means == name:
            return means
    raise UsageError(f"unknown communication {name!r}{suggest(str(name), MEANS)}")


@dataclass(frozen=True)
class Wire:
    """Cost of a message: `latency_s` seconds, plus bytes / `bandwidth` (bytes per second).

    With several `nodes`, over which a group's ranks are spread in equal runs, messages inside a node have the cost of
    `node_latency_s` and `node_bandwidth`. Raises `UsageError` for a latency below 0, and for a bandwidth that is not
    above 0.
    """

    latency_s: float = field(
        default=20e-6,
        metadata={"metavar": "S", "doc": "Seconds that a message costs, for communication auto."},
    )
    bandwidth: float = field(
        default=1e9, metadata={"metavar": "B/S", "doc": "Bytes per second between two ranks, for communication auto."}
    )
    nodes: int = field(
        default=1,
        metadata={
            "metavar": "N",
            "doc": "Nodes over which replicas are spread, equally many on each, for communication two-level and auto.",
        },
    )
    node_latency_s: float = field(
        default=5e-6, metadata={"metavar": "S", "doc": "Seconds that a message costs inside a node, with nodes."}
    )
    node_bandwidth: float = field(
        default=100e9, metadata={"metavar": "B/S", "doc": "Bytes per second inside a node, with nodes."}
    )

    def __post_init__(self) -> None:
        for latency_s in (self.latency_s, self.node_latency_s):
            if not 0 <= latency_s <= LARGEST_FIGURE:
                raise UsageError(f"a message cannot have a latency of {latency_s!r} s")
        for bandwidth in (self.bandwidth, self.node_bandwidth):
            if not 1 / LARGEST_FIGURE <= bandwidth <= LARGEST_FIGURE:
                raise UsageError(f"a wire cannot carry {bandwidth!r} bytes per second")
        if type(self.nodes) is not int or self.nodes < 1:
            raise UsageError(f"ranks cannot be spread over {self.nodes!r} nodes")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message takes, between nodes if there are several."""
        return self.latency_s + num_bytes / self.bandwidth

    def node_seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message takes inside a node."""
        return self.node_latency_s + num_bytes / self.node_bandwidth if self.nodes > 1 else self.seconds(num_bytes)


@dataclass(frozen=True)
class Communication:
    """Means by which gradient buckets are exchanged, with the collectives (by name) that spell it out in messages.

    `plans` holds `quintsched.collectives.CollectivePlan` objects; this package uses their names only.
    """

    means: Means = "native"
    plans: Mapping[str, Any] = field(default_factory=dict)
    wire: Wire = field(default_factory=Wire)
    """Cost by which "auto" chooses, and nodes of "two-level"; unused by other means."""

    @property
    def uses_wire(self) -> bool:
        """Whether the exchange depends on the wire."""
        return self.means in ("auto", "two-level")


NATIVE = Communication()
