"""Sharded gradients (ZeRO): each replica keeps the sum of its shard of every bucket.

    stage 1         backwards ─▶ [   full gradients   ] ─ reduce-scatter once ─▶ shard of the sum, in place
    stages 2, 3     backward  ─▶ [   full gradients   ] ─ reduce-scatter ─▶ added to the shard, full ones freed
                    backward  ─▶ [   full gradients   ] ─ …

Full gradients of stages 2 and 3 are resident from a backward to the end of its reduction, which is waited for before
the next backward or gathering of weights on this rank: others take their memory. A gradient that comes where its bucket
is not expected, from the first half of a backward, makes it resident by itself. Where gradients are partial sums on the
ranks of tp, shards are added up over tp at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Group, Work
from .grad_buckets import NO_GRADIENT, GradBucket, with_versions
from .master_weights import Masters
from .memory_stats import MemoryKind, MemoryStats, ResizableStorage
from .zero_params import WeightBucket


class ShardedGradBucket(GradBucket):
    """A bucket whose gradients become each replica's shard of their sum.

    `reshards` says whether full ones are freed after each reduction.
    """

    def __init__(self, weights: WeightBucket, masters: Masters, *, reshards: bool, stats: MemoryStats) -> None:
        self._layout = weights.layout
        self._segments = weights.segments
        self.reshards = reshards and weights.layout.num_shards > 1
        self._stats = stats
        super().__init__(weights.plan_bucket, weights.parameters, masters)
        if self.reshards:
            self._free_full()

    def _lay_out(self, local: list[Tensor], dtype: torch.dtype, masters: Masters) -> None:
        device = local[0].device
        self.flat = self._layout.empty(dtype, device)
        self.views = with_versions(self._layout.views(self.flat))
        self._reduced = self._layout.shard(self.flat)
        self.shard = torch.full_like(self._reduced, NO_GRADIENT) if self.reshards else self._reduced
        places = [segment.at for segment in self._layout.segments() if segment is not None]
        self.firsts = torch.tensor(places, dtype=torch.int64, device=device)
        self._storage = ResizableStorage(self.flat, MemoryKind.GRADIENTS, self._stats)
        if self.reshards:
            ResizableStorage(self.shard, MemoryKind.GRADIENTS, self._stats)
        self._grads = [
            (master, gradient)
            for master, gradient in zip(self._segments, self._layout.held(self.shard), strict=True)
            if master is not None and gradient is not None
        ]

    def allocate_full(self) -> None:
        """Make full gradients resident, where nothing was added up yet."""
        if self.reshards and not self._storage.is_resident:
            self._storage.allocate()
            self._layout.zero_gaps(self.flat)
            self.blank = set(self.parameters)

    def fill(self) -> None:
        """Let the gradients that no backward brought be zero, where full ones are resident."""
        if self._storage.is_resident:
            super().fill()

    def reduce(self, group: Group) -> Work:
        """Begin to sum what was added up since the last time, each replica its shard."""
        self.allocate_full()
        self.fill()
        return group.reduce_scatter(self._reduced, self.flat)

    def finish_reduction(self) -> None:
        """Add what has been reduced to the shard, and free full gradients."""
        if self.reshards:
            self.shard.add_(self._reduced)
            self._free_full()

    def counted(self, counts: Sequence[bool]) -> list[Tensor]:
        """Return what the shard has of the parameters that count."""
        if all(counts):
            return [self.shard]
        segments = zip(self._layout.segments(), counts, strict=True)
        return [segment.of(self.shard) for segment, here in segments if segment is not None and here]

    def clear(self, *, afresh: bool = False) -> None:
        """Begin again: with nothing, or at zero where shards are what is added up."""
        super().clear()
        if self.reshards:
            self.shard.fill_(NO_GRADIENT)
        elif afresh:
            self._layout.zero_gaps(self.flat)

    def held(self) -> list[Tensor | None]:
        """Return the gradient of each parameter, as far as the shard has it; None where it has nothing of it."""
        return self._layout.held(self.shard)

    def _free_full(self) -> None:
        self.attach()
        self._storage.free()
