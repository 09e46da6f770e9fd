"""What a search asks of a prediction: the time and the memory of many strategies at once, and the parts that bounds need.

    time    ≥ pipeline_s                  the rest: what ends a step, exchanges of gradients and the optimizer
    memory  ≥ the fullest of resident     the rest: buffers, fragmentation

`Predictor` is what `prediction` says; tests have one of a few lines in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quintsched.descriptions.strategy import Strategy
from quintsched.tuning.space import Columns, Ints

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What was found of n strategies; arrays of length n."""

    time_s: Floats
    """Of a step."""
    memory_bytes: Floats
    """Of the fullest rank."""
    pipeline_s: Floats
    """From the first forward to the last backward."""
    resident: Floats
    """(n, kinds): weights, gradients, optimizer state and activations of each kind of rank. Two strategies that differ in
    `SWITCHES` alone, with one recomputation for all stages, have the same kinds; what is missing is 0."""
    exact: Mask
    """False where there is no closed form: the time is then a lower bound."""


class Evaluator(Protocol):
    """A prediction for one space on one cluster."""

    @property
    def capacity_bytes(self) -> float:
        """What a rank may hold."""

    def evaluate(self, columns: Columns, numbers: Ints | None = None) -> Outcome:
        """Evaluate the rows; one that says "per-stage" counts as "none".

        `numbers` (rows, pp), where all rows have that pp: how many layers the stages of each rank recompute.
        """

    def rank_bytes(self, columns: Columns) -> Floats:
        """Return (rows, pp), where all rows have that pp: all that each pipeline rank holds."""

    def simulate(self, strategy: Strategy) -> float:
        """Return the seconds of a step that has no closed form."""
