"""Values: tensors and numbers resident on a rank between two instructions, their kinds, and an integer key for each.

    Value(OUTPUT, stage 2, number 5)      the output of stage 2, microbatch 5

    Numbering       OUTPUT: stage 0, 1, …   OUTPUT_GRAD: stage 0, 1, …   SAVED: …      numbered one after the other

The instructions that produce and consume them are found in `quintsched.ir.dataflow_analysis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import cached_property
from typing import NamedTuple

import numpy as np

from quintsched.ir.instruction_columns import Flags, Ints


@unique
class ValueKind(IntEnum):
    """Kind of a value; the `number` of a value is its microbatch unless stated otherwise."""

    OUTPUT = 0
    """Output activation of a stage."""
    OUTPUT_GRAD = 1
    """Gradient of a stage's output."""
    SKIP = 2
    """Skip tensor as this stage takes it: the number is microbatch x `MAX_SKIPS` + skip."""
    SKIP_GRAD = 3
    """Gradient of a skip, summed over this stage and all later takers; numbered like `SKIP`."""
    SAVED = 4
    """Activations that a forward keeps for its backward."""
    LOSS = 5
    """Loss of a microbatch, on the last stage and on others that have one."""
    WEIGHT_GRAD = 6
    """Contribution of one microbatch to a stage's weight gradients."""
    REDUCED = 7
    """Gradient bucket summed over the replicas: the number is reduction x `REDUCTION` + bucket."""
    METRICS = 8
    """Loss, loss weight and metrics of the whole batch, known on this rank."""
    NORM = 9
    """Global gradient norm."""
    PENDING = 10
    """State that the input half of a backward leaves for its weight half."""
    TIED = 11
    """Summed gradients of a stage's tied weights; the number is the tie's."""
    KEYS = 12
    """Keys and values of a slice and those before it, which the next slice attends to."""
    KEYS_GRAD = 13
    """Gradient of these, from the next slice's backward."""
    CHECKPOINT = 14
    """Tensors that a forward keeps of a stage that is recomputed, such as its input, in place of `SAVED`."""
    PARAMS = 15
    """Full weights of a stage whose replicas hold shards; the number counts gatherings."""
    STEPPED = 16
    """Bucket of weights of which each replica has stepped its shard."""
    OFFLOADED = 17
    """Saved activations, in host memory."""
    FETCHED = 18
    """Saved activations, back from host memory or from another rank."""
    LOAN = 19
    """Record of saved activations that are in another rank's memory, on the rank that lends them."""
    LENT = 20
    """Saved activations of another rank's stage, on the rank that holds them for it."""


WORDS = {
    ValueKind.OUTPUT: "output",
    ValueKind.OUTPUT_GRAD: "output's gradient",
    ValueKind.SKIP: "skip",
    ValueKind.SKIP_GRAD: "gradient of skip",
    ValueKind.SAVED: "saved activations",
    ValueKind.LOSS: "loss",
    ValueKind.WEIGHT_GRAD: "weight gradient",
    ValueKind.REDUCED: "reduced gradient",
    ValueKind.METRICS: "metrics",
    ValueKind.NORM: "gradient norm",
    ValueKind.PENDING: "pending weight half",
    ValueKind.TIED: "tied gradient",
    ValueKind.KEYS: "keys and values",
    ValueKind.KEYS_GRAD: "gradient of the keys and values",
    ValueKind.CHECKPOINT: "checkpoint",
    ValueKind.PARAMS: "full weights",
    ValueKind.STEPPED: "stepped shards",
    ValueKind.OFFLOADED: "offloaded activations",
    ValueKind.FETCHED: "fetched activations",
    ValueKind.LOAN: "loan of activations",
    ValueKind.LENT: "lent activations",
}

COUNTED = {
    ValueKind.REDUCED: "bucket",
    ValueKind.TIED: "tie",
    ValueKind.PARAMS: "gathering",
    ValueKind.STEPPED: "bucket",
}
"""Unit of a value's number, where it is not a microbatch."""

AMBIENT = frozenset({ValueKind.METRICS, ValueKind.NORM})
"""Kinds that may be read any number of times and may be left at the end of a program; every rank has its own."""


REDUCTION = 2048
"""Factor of the reduction in the number of a `REDUCED` value; larger than any number of buckets."""

MAX_SKIPS = 1024
"""Maximum number of skips of a plan; the factor of the microbatch in the number of their values."""

SKIPS = (ValueKind.SKIP, ValueKind.SKIP_GRAD)
"""Kinds of which a stage has one value per microbatch and skip."""

TRAVELS = (ValueKind.OUTPUT, ValueKind.OUTPUT_GRAD, *SKIPS)
"""Kinds that are sent from rank to rank: the first ones of `ValueKind`."""


class Value(NamedTuple):
    """Value that is resident on a rank between two instructions."""

    kind: ValueKind
    stage: int
    number: int

    def __str__(self) -> str:
        words = WORDS[self.kind]
        if self.kind in AMBIENT:
            return f"the {words}"
        if self.kind in SKIPS:
            unit, skip = divmod(self.number, MAX_SKIPS)
            return f"the {words} {skip} at stage {self.stage}, microbatch {unit}"
        reduction, number = divmod(self.number, REDUCTION) if self.kind is ValueKind.REDUCED else (0, self.number)
        which = f", part {reduction}" if reduction else ""
        return f"the {words} of stage {self.stage}, {COUNTED.get(self.kind, 'microbatch')} {number}{which}"


METRICS = Value(ValueKind.METRICS, 0, 0)
NORM = Value(ValueKind.NORM, 0, 0)


@dataclass(frozen=True)
class Numbering:
    """Dense integer keys for all values of a plan, so that arrays can be indexed by them.

    `counts` gives the number of values of each kind per stage; for ambient kinds, their total.
    """

    num_stages: int
    counts: Mapping[ValueKind, int]
    num_buckets: int
    num_skips: int = 0

    @cached_property
    def firsts(self) -> Ints:
        """Key of the first value of each kind, and the total."""
        sizes = [self.counts[kind] * (1 if kind in AMBIENT else self.num_stages) for kind in ValueKind]
        return np.cumsum([0, *sizes])

    @property
    def size(self) -> int:
        """Number of keys."""
        return int(self.firsts[-1])

    @property
    def num_travelling(self) -> int:
        """Number of keys, the first ones, that belong to values sent from rank to rank."""
        return int(self.firsts[len(TRAVELS)])

    def keys(self, kind: ValueKind, stages: Ints, numbers: Ints) -> Ints:
        """Return the keys of values.

        The number of a reduced gradient here is reduction x buckets + bucket, that of a skip microbatch x skips + skip.
        """
        found: Ints = self.firsts[kind] + stages * self.counts[kind] + numbers
        return found

    def value(self, key: int) -> Value:
        """Return the value of a key."""
        kind = ValueKind(int(np.searchsorted(self.firsts, key, side="right")) - 1)
        if kind in AMBIENT:
            return Value(kind, 0, 0)
        stage, number = divmod(int(key - self.firsts[kind]), self.counts[kind])
        if kind is ValueKind.REDUCED:
            reduction, bucket = divmod(number, self.num_buckets)
            number = reduction * REDUCTION + bucket
        if kind in SKIPS:
            unit, skip = divmod(number, self.num_skips)
            number = unit * MAX_SKIPS + skip
        return Value(kind, stage, number)

    def of_kind(self, keys: Ints, kind: ValueKind) -> Flags:
        """Mask of the keys that belong to values of a kind."""
        found: Flags = (keys >= self.firsts[kind]) & (keys < self.firsts[kind + 1])
        return found

    def stages(self, keys: Ints, kind: ValueKind) -> Ints:
        """Stages of keys of one kind."""
        found: Ints = (keys - self.firsts[kind]) // self.counts[kind]
        return found

    def numbers(self, keys: Ints, kind: ValueKind) -> Ints:
        """Numbers of keys of one kind."""
        found: Ints = (keys - self.firsts[kind]) % self.counts[kind]
        return found
