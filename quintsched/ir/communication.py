"""How replicas exchange gradients: by which means, and what a message costs on the wire between them.

Imports next to nothing: a request names these, and `quintsched --help` reads the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from quintsched.errors import UsageError, suggest

Means = Literal["native", "ring", "tree", "auto"]
MEANS: tuple[Means, ...] = get_args(Means)


MOST = 1e100
"""The most seconds, and bytes, of a message: sums of what messages take stay finite numbers."""


def find_means(name: str) -> Means:
    """Return the means of this name; raises `UsageError`."""
    for means in MEANS:
        if means == name:
            return means
    raise UsageError(f"unknown communication {name!r}{suggest(str(name), MEANS)}")


@dataclass(frozen=True)
class Wire:
    """What a message costs: `latency_s` seconds, and one second for `bandwidth` bytes.

    Raises `UsageError` for a latency below 0 and a bandwidth that is not above 0.
    """

    latency_s: float = field(
        default=20e-6,
        metadata={"metavar": "S", "doc": "Seconds that a message costs, which communication auto reckons with."},
    )
    bandwidth: float = field(
        default=1e9, metadata={"metavar": "B/S", "doc": "Bytes per second between two ranks, likewise."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= MOST:
            raise UsageError(f"a message cannot have a latency of {self.latency_s!r} s")
        if not 1 / MOST <= self.bandwidth <= MOST:
            raise UsageError(f"a wire cannot carry {self.bandwidth!r} bytes per second")

    def seconds(self, num_bytes: float) -> float:
        """Return how long a message takes."""
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Communication:
    """The means by which buckets are exchanged, and the collectives (by name) that spell it out in messages.

    `plans` holds each as a `quintsched.collectives.CollectivePlan`; what this room knows of one is its name.
    """

    means: Means = "native"
    plans: Mapping[str, Any] = field(default_factory=dict)
    wire: Wire = field(default_factory=Wire)
    """What "auto" reckons with; the others do not look at it."""


NATIVE = Communication()
