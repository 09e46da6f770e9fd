"""Means of gradient exchange between replicas, and the latency-bandwidth cost of a message on the wire.

Imports almost nothing: requests use these names, and `quintsched --help` imports the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from quintsched.errors import UsageError, suggest

Means = Literal["native", "ring", "tree", "auto"]
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

    Raises `UsageError` for a latency below 0, and for a bandwidth that is not above 0.
    """

    latency_s: float = field(
        default=20e-6,
        metadata={"metavar": "S", "doc": "Seconds that a message costs, for communication auto."},
    )
    bandwidth: float = field(
        default=1e9, metadata={"metavar": "B/S", "doc": "Bytes per second between two ranks, for communication auto."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= LARGEST_FIGURE:
            raise UsageError(f"a message cannot have a latency of {self.latency_s!r} s")
        if not 1 / LARGEST_FIGURE <= self.bandwidth <= LARGEST_FIGURE:
            raise UsageError(f"a wire cannot carry {self.bandwidth!r} bytes per second")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message takes."""
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Communication:
    """Means by which gradient buckets are exchanged, with the collectives (by name) that spell it out in messages.

    `plans` holds `quintsched.collectives.CollectivePlan` objects; this package uses their names only.
    """

    means: Means = "native"
    plans: Mapping[str, Any] = field(default_factory=dict)
    wire: Wire = field(default_factory=Wire)
    """Cost by which "auto" chooses; unused by other means."""


NATIVE = Communication()
