"""Exact bytes of weights, gradients and optimizer state in this project's runtime, with its aligned buffers.

    weights of a stage, last first     w9 w8 w7 │ w6 w5 │ w4 … w0         buckets of a maximum size
    one bucket, two replicas           [ w9 · w8 │ · w7 ·· ]              ·: padding; shards are equal

`state` has the same without buckets: padding is at most 32 elements per weight and per shard. The result equals
`Engine.state_bytes`, including the counters of Adam's steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.parameters import Weight, block_weights, embedding_weights, head_weights

ALIGNMENT = 32
"""Alignment of weights in a shared buffer, in elements."""

COUNTER = 4
"""Bytes of Adam's step counter per weight."""

STAGES_AT_ONCE = 2
"""Number of stages of a rank whose full weights are resident at once with ZeRO-3."""


class Tensor(NamedTuple):
    """One weight on one rank: its number of elements, and the group that reduces its gradient."""

    numbers: int
    group: str
    """"dense", "partial" (a partial sum on each tp rank), "apart" (tied) or "experts"."""
    waits: bool
    """Whether its gradient may be deferred to the weight half of a split backward."""


@dataclass(frozen=True)
class BucketLayout:
    """Layout of one rank's state in this project's runtime; see the module.

    `replica` and `expert_replica` are its indices among `replicas` and `expert_replicas`.
    """

    tp: int = 1
    ep: int = 1
    replicas: int = 1
    expert_replicas: int = 1
    replica: int = 0
    expert_replica: int = 0
    zero: int = 0
    element: int = 4
    sequence_parallel: bool = False
    splits_backward: bool = False
    bucket_bytes: int = 25_000_000

    def state_bytes(self, stages: Sequence[Sequence[Tensor]]) -> dict[str, int]:
        """Return the peak bytes of weights and gradients, and the optimizer's state, of a rank with these stages."""
        wide = max(self.element, 4)
        if self.zero == 0:
            numbers = sum(tensor.numbers for stage in stages for tensor in stage)
            tensors = sum(len(stage) for stage in stages)
            masters = wide * numbers if self.element < 4 else 0
            return {
                "weights": self.element * numbers,
                "gradients": wide * numbers,
                "optimizer": masters + 2 * wide * numbers + COUNTER * tensors,
            }
        buckets = [list(self._buckets(stage)) for stage in stages]
        return {
            "weights": self.element * self._resident(buckets, self.zero >= 3, STAGES_AT_ONCE),
            "gradients": wide * self._resident(buckets, self.zero >= 2, 1),
            "optimizer": sum(self._optimizer(bucket, wide) for stage in buckets for bucket in stage),
        }

    def _resident(self, buckets: Sequence[Sequence[_Bucket]], sharded: bool, at_once: int) -> int:
        """Return the peak number of resident elements: shards, and the full buffers of `at_once` stages beside them."""
        if not sharded:
            return sum(bucket.size for stage in buckets for bucket in stage)
        always = sum(bucket.shard if bucket.replicas > 1 else bucket.size for stage in buckets for bucket in stage)
        full = sorted(sum(bucket.size for bucket in stage if bucket.replicas > 1) for stage in buckets)
        return always + sum(full[-at_once:])

    def _optimizer(self, bucket: _Bucket, wide: int) -> int:
        masters = wide * bucket.shard if self.element < 4 else 0
        segments = [length for length in bucket.segments() if length]
        return masters + 2 * wide * sum(segments) + COUNTER * len(segments)

    def _buckets(self, stage: Sequence[Tensor]) -> Iterator[_Bucket]:
        """Yield a stage's buckets; within each group, weights whose gradients may be deferred are separate."""
        for group in ("dense", "partial", "experts"):
            tensors = [tensor for tensor in reversed(stage) if tensor.group == group]
            for waits in (False, True):
                some = [t.numbers for t in tensors if (t.waits and self._keeps_apart) == waits]
                for numbers in self._cut(some):
                    yield self._bucket(numbers, group)
        yield from (self._bucket([tensor.numbers], "apart") for tensor in stage if tensor.group == "apart")

    @property
    def _keeps_apart(self) -> bool:
        return self.splits_backward and self.zero >= 2

    def _cut(self, tensors: Iterable[int]) -> Iterator[list[int]]:
        collected: list[int] = []
        for numbers in tensors:
            if collected and (sum(collected) + numbers) * self.element > self.bucket_bytes:
                yield collected
                collected = []
            collected.append(numbers)
        if collected:
            yield collected

    def _bucket(self, numbers: Sequence[int], group: str) -> _Bucket:
        if group == "experts":
            return _Bucket(tuple(numbers), self.expert_replicas, self.expert_replica)
        return _Bucket(tuple(numbers), self.replicas, self.replica)


@dataclass(frozen=True)
class _Bucket:
    """Weights in one buffer of equal shards, of which a rank has shard `index`."""

    numbers: tuple[int, ...]
    replicas: int
    index: int

    @property
    def shard(self) -> int:
        """Elements of one shard."""
        used = sum(-(-numbers // ALIGNMENT) * ALIGNMENT for numbers in self.numbers)
        return -(-used // (self.replicas * ALIGNMENT)) * ALIGNMENT

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.replicas * self.shard

    def segments(self) -> Iterator[int]:
        """Yield the number of elements of each weight in the shard."""
        first, start = self.index * self.shard, 0
        for numbers in self.numbers:
            yield max(min(start + numbers, first + self.shard) - max(start, first), 0)
            start += -(-numbers // ALIGNMENT) * ALIGNMENT


def stage_tensors(
    model: Model, layout: BucketLayout, layers: Iterable[int], *, seq: int, first: bool, last: bool
) -> list[Tensor]:
    """Return the weights of one stage in the order of its modules; `first` has the embedding, `last` the head.

    Weights tied across stages are "apart"; if one stage has both ends, the head is the embedding.
    """
    partial = layout.sequence_parallel and layout.tp > 1
    tied, places = model.tied and first != last, model.layer_kinds
    found: list[Tensor] = []
    if first:
        found += _tensors(embedding_weights(model, seq), layout, apart="tokens.weight" if tied else "")
    for layer in layers:
        found += _tensors(block_weights(model, model.kinds[places[layer]]), layout, partial=partial)
    if last:
        head = [w for w in head_weights(model) if not (model.tied and first and w.name == "head.weight")]
        found += _tensors(head, layout, apart="head.weight" if tied else "")
    return found


def _tensors(
    weights: Iterable[Weight], layout: BucketLayout, *, partial: bool = False, apart: str = ""
) -> Iterator[Tensor]:
    """Yield the weights on one rank; experts follow each other, each with all of its weights."""
    listed = list(weights)
    experts = [weight for weight in listed if weight.copies > 1]
    for weight in listed:
        if weight.copies == 1:
            group = "apart" if weight.name == apart else "partial" if partial and _is_partial(weight) else "dense"
            yield Tensor(int(weight.on_rank(layout.tp)), group, _waits(weight))
        elif weight is experts[0]:
            group = "experts" if layout.ep > 1 else "dense"
            for _ in range(weight.copies // layout.ep):
                yield from (Tensor(int(one.on_rank(layout.tp)), group, _waits(one)) for one in experts)


def _is_partial(weight: Weight) -> bool:
    """Return whether an unsharded weight sees only a slice of the tokens on each tp rank."""
    return not weight.is_cut and weight.kind != "router"


def _waits(weight: Weight) -> bool:
    """Return whether a weight belongs to a matrix product or a lookup, whose gradient can be deferred."""
    return weight.kind != "norms" and weight.name not in ("class_token", "positions")
