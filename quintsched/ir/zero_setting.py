"""ZeRO: the state of a stage that its replicas shard among them.

    stage    weights     gradients    optimizer state       replica 0 │ replica 1
    0        all         all          all
    1        all         all          a shard               ▇▇▇▇ ▇▇▇▇ ▇▇·· │ ▇▇▇▇ ▇▇▇▇ ··▇▇
    2        all         a shard      a shard               ▇▇▇▇ ▇▇·· ▇▇·· │ ▇▇▇▇ ··▇▇ ··▇▇
    3        a shard     a shard      a shard               ▇▇·· ▇▇·· ▇▇·· │ ··▇▇ ··▇▇ ··▇▇

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Zero:
    """ZeRO setting: how far a stage's state is sharded over its replicas instead of being resident on each.

    `stage` 0: nothing; 1: the optimizer's state; 2: gradients as well; 3: weights as well. From 2 on, gradients are
    reduced after every `every` microbatches, so that full gradients are never resident for longer.
    """

    stage: int = 0
    every: int = 1

    @property
    def shards_optimizer(self) -> bool:
        """Whether each replica keeps and steps only its shard of the optimizer's state."""
        return self.stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether full gradients are resident only until they are reduced."""
        return self.stage >= 2

    @property
    def shards_weights(self) -> bool:
        """Whether full weights are resident only from a `GatherParams` to a `FreeParams`."""
        return self.stage >= 3
