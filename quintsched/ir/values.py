"""What is resident on a rank between two instructions: kinds of values, their names, and a number for each.

    Value(OUTPUT, stage 2, number 5)      the output of stage 2, microbatch 5

    Numbering       OUTPUT: stage 0, 1, …   OUTPUT_GRAD: stage 0, 1, …   SAVED: …      numbered one after the other

What makes and takes them is said in `quintsched.ir.dataflow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import cached_property
from typing import NamedTuple

import numpy as np

from quintsched.ir.columns import Flags, Ints


@unique
class Kind(IntEnum):
    """What a value is; the `number` of a value is a microbatch unless said otherwise."""

    OUTPUT = 0
    """The output activation of a stage."""
    OUTPUT_GRAD = 1
    """The gradient of a stage's output."""
    SKIP = 2
    """A skip as this stage takes it: the number is microbatch x `MAX_SKIPS` + skip."""
    SKIP_GRAD = 3
    """Its gradient, added up over this stage and all that take the skip after it; numbered likewise."""
    SAVED = 4
    """What a forward keeps for its backward."""
    LOSS = 5
    """The loss of a microbatch, on the last stage and on others that have one."""
    WEIGHT_GRAD = 6
    """A microbatch's term of a stage's weight gradients."""
    REDUCED = 7
    """A bucket of gradients, summed over the replicas: the number is reduction x `REDUCTION` + bucket."""
    METRICS = 8
    """The batch's loss, loss weight and metrics, known on this rank."""
    NORM = 9
    """The global gradient norm."""
    PENDING = 10
    """What a backward's input half leaves for its weight half."""
    TIED = 11
    """The gradients of tied weights of a stage, added up; the number is the tie's."""
    KEYS = 12
    """The keys and values of a slice and those before it, which the next slice attends to."""
    KEYS_GRAD = 13
    """The gradient of these, from the next slice's backward."""
    CHECKPOINT = 14
    """What a forward keeps of a stage that is recomputed."""
    PARAMS = 15
    """The full weights of a stage whose replicas hold shards of them; the number counts gatherings."""
    STEPPED = 16
    """A bucket of weights of which each replica has stepped its shard."""
    OFFLOADED = 17
    """What a forward keeps, in the host's memory."""
    FETCHED = 18
    """What a forward kept, back from the host's memory."""


_WORDS = {
    Kind.OUTPUT: "output",
    Kind.OUTPUT_GRAD: "output's gradient",
    Kind.SKIP: "skip",
    Kind.SKIP_GRAD: "gradient of skip",
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
    Kind.STEPPED: "stepped shards",
    Kind.OFFLOADED: "offloaded activations",
    Kind.FETCHED: "fetched activations",
}

_COUNTED = {Kind.REDUCED: "bucket", Kind.TIED: "tie", Kind.PARAMS: "gathering", Kind.STEPPED: "bucket"}
"""What the numbers of values count, where it is not microbatches."""

AMBIENT = frozenset({Kind.METRICS, Kind.NORM})
"""Kinds that may be read any number of times and may be resident when the program ends; every rank has its own."""


REDUCTION = 2048
"""What the numbers of reduced gradients count reductions by; there are fewer buckets than that."""

MAX_SKIPS = 1024
"""The most skips of a plan; what the numbers of their values count microbatches by."""

SKIPS = (Kind.SKIP, Kind.SKIP_GRAD)
"""Kinds of which a stage has a value per microbatch and skip."""

TRAVELS = (Kind.OUTPUT, Kind.OUTPUT_GRAD, *SKIPS)
"""Kinds that go from rank to rank: the first ones."""


class Value(NamedTuple):
    """Something that is resident on a rank between two instructions."""

    kind: Kind
    stage: int
    number: int

    def __str__(self) -> str:
        words = _WORDS[self.kind]
        if self.kind in AMBIENT:
            return f"the {words}"
        if self.kind in SKIPS:
            unit, skip = divmod(self.number, MAX_SKIPS)
            return f"the {words} {skip} at stage {self.stage}, microbatch {unit}"
        reduction, number = divmod(self.number, REDUCTION) if self.kind is Kind.REDUCED else (0, self.number)
        which = f", part {reduction}" if reduction else ""
        return f"the {words} of stage {self.stage}, {_COUNTED.get(self.kind, 'microbatch')} {number}{which}"


METRICS = Value(Kind.METRICS, 0, 0)
NORM = Value(Kind.NORM, 0, 0)


@dataclass(frozen=True)
class Numbering:
    """A number, its key, for every value of a plan: dense, so that arrays can be indexed by it.

    `counts` says how many values of each kind a stage has; of ambient kinds, how many there are.
    """

    num_stages: int
    counts: Mapping[Kind, int]
    num_buckets: int
    num_skips: int = 0

    @cached_property
    def firsts(self) -> Ints:
        """The key of the first value of each kind, and their total."""
        sizes = [self.counts[kind] * (1 if kind in AMBIENT else self.num_stages) for kind in Kind]
        return np.cumsum([0, *sizes])

    @property
    def size(self) -> int:
        """How many keys there are."""
        return int(self.firsts[-1])

    @property
    def num_travelling(self) -> int:
        """How many of them, the first ones, belong to values that travel from rank to rank."""
        return int(self.firsts[len(TRAVELS)])

    def keys(self, kind: Kind, stages: Ints, numbers: Ints) -> Ints:
        """Return the keys of values.

        The number of a reduced gradient is reduction x buckets + bucket here, that of a skip microbatch x skips + skip.
        """
        found: Ints = self.firsts[kind] + stages * self.counts[kind] + numbers
        return found

    def value(self, key: int) -> Value:
        """Return the value that a key stands for."""
        kind = Kind(int(np.searchsorted(self.firsts, key, side="right")) - 1)
        if kind in AMBIENT:
            return Value(kind, 0, 0)
        stage, number = divmod(int(key - self.firsts[kind]), self.counts[kind])
        if kind is Kind.REDUCED:
            reduction, bucket = divmod(number, self.num_buckets)
            number = reduction * REDUCTION + bucket
        if kind in SKIPS:
            unit, skip = divmod(number, self.num_skips)
            number = unit * MAX_SKIPS + skip
        return Value(kind, stage, number)

    def of_kind(self, keys: Ints, kind: Kind) -> Flags:
        """Which of the keys belong to values of a kind."""
        found: Flags = (keys >= self.firsts[kind]) & (keys < self.firsts[kind + 1])
        return found

    def stages(self, keys: Ints, kind: Kind) -> Ints:
        """The stages of values of one kind."""
        found: Ints = (keys - self.firsts[kind]) // self.counts[kind]
        return found

    def numbers(self, keys: Ints, kind: Kind) -> Ints:
        """The numbers of values of one kind."""
        found: Ints = (keys - self.firsts[kind]) % self.counts[kind]
        return found
