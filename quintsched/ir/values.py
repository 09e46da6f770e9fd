"""What stands on a rank between two instructions: kinds of values, and their names.

    Value(OUTPUT, stage 2, number 5)      the output of stage 2, microbatch 5

What makes and takes them is said in `quintsched.ir.dataflow`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a value is; the `number` of a value is a microbatch unless said otherwise."""

    OUTPUT = 0
    """The output activation of a stage."""
    OUTPUT_GRAD = 1
    """The gradient of a stage's output."""
    SAVED = 2
    """What a forward keeps for its backward."""
    LOSS = 3
    """The loss of a microbatch, on the last stage."""
    WEIGHT_GRAD = 4
    """A microbatch's share of a stage's weight gradients."""
    REDUCED = 5
    """A bucket of gradients, summed over the replicas: the number is part x `PART` + bucket."""
    METRICS = 6
    """The batch's loss, loss weight and metrics, known on this rank."""
    NORM = 7
    """The global gradient norm."""
    PENDING = 8
    """What a backward's input half leaves for its weight half."""
    TIED = 9
    """The gradients of tied weights of a stage, added up; the number is the tie's."""
    KEYS = 10
    """The keys and values of a slice and those before it, which the next slice attends to."""
    KEYS_GRAD = 11
    """The gradient of these, from the next slice's backward."""
    CHECKPOINT = 12
    """What a forward keeps of a stage that is recomputed."""
    PARAMS = 13
    """The full weights of a stage whose replicas hold shares of them; the number counts gatherings."""
    STEPPED = 14
    """A bucket of weights of which each replica has stepped its share."""


_WORDS = {
    Kind.OUTPUT: "output",
    Kind.OUTPUT_GRAD: "output's gradient",
    Kind.SAVED: "saved activations",
    Kind.LOSS: "loss",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.REDUCED: "reduced gradient",
    Kind.METRICS: "metrics",
    Kind.NORM: "gradient norm",
    Kind.PENDING: "pending weight half",
    Kind.TIED: "tied gradient",
    Kind.KEYS: "keys and values",
    Kind.KEYS_GRAD: "gradient of the keys and values",
    Kind.CHECKPOINT: "checkpoint",
    Kind.PARAMS: "full weights",
    Kind.STEPPED: "stepped shares",
}

_COUNTED = {Kind.REDUCED: "bucket", Kind.TIED: "tie", Kind.PARAMS: "gathering", Kind.STEPPED: "bucket"}
"""What the numbers of values count, where it is not microbatches."""

AMBIENT = frozenset({Kind.METRICS, Kind.NORM})
"""Kinds that may be read any number of times and may stand when the program ends."""


PART = 2048
"""What the numbers of reduced gradients count parts by; there are fewer buckets than that."""

TRAVELS = (Kind.OUTPUT, Kind.OUTPUT_GRAD)
"""Kinds that go from rank to rank."""


class Value(NamedTuple):
    """Something that stands on a rank between two instructions."""

    kind: Kind
    stage: int
    number: int

    def __str__(self) -> str:
        words = _WORDS[self.kind]
        if self.kind in AMBIENT:
            return f"the {words}"
        part, number = divmod(self.number, PART) if self.kind is Kind.REDUCED else (0, self.number)
        parts = f", part {part}" if part else ""
        return f"the {words} of stage {self.stage}, {_COUNTED.get(self.kind, 'microbatch')} {number}{parts}"


METRICS = Value(Kind.METRICS, 0, 0)
NORM = Value(Kind.NORM, 0, 0)
