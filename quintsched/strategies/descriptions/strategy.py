"""Strategy of one training step: the mesh, and all other choices of the user.

    Strategy(gpus=1024, dp=16, tp=8, pp=8, microbatch=1, batch=1536, seq=2048, chunks=3, recompute="selective",
             sequence_parallel=True)

dp · tp · pp · cp · ep = gpus; the batch is divided over dp · ep replicas into microbatches of `microbatch` samples.
"""

from __future__ import annotations

from typing import Literal

from quintsched.strategies.descriptions.model import Count, Description, Size

Recompute = Literal["none", "selective", "full"] | Count | tuple[int, ...]
"""Recomputed layers of each stage: none, attention scores only, all, a number of them, or a number per stage."""


class Strategy(Description):
    """Parallel layout of a model's training step; see the module. `placement.check` validates it."""

    gpus: Size
    dp: Size = 1
    tp: Size = 1
    pp: Size = 1
    cp: Size = 1
    ep: Size = 1
    microbatch: Size = 1
    """Samples of a microbatch."""
    batch: Size
    """Samples of a step, over all replicas."""
    seq: Size
    """Tokens of a sample."""
    chunks: Size | None = None
    """Stages per pipeline rank; None: the fewest that the schedule takes."""
    schedule: str | None = None
    """Name of the schedule; None: "1f1b", or "interleaved-1f1b" with more than one chunk."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    overlap: bool = False
    """Whether replicas reduce a stage's gradients during the backwards of other stages; else after all backwards, as in
    the runs measured by Megatron-LM's papers."""
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    stages: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as possible, with the remainder on the first stages."""

    @property
    def replicas(self) -> int:
        """Number of replicas that share the batch."""
        return self.dp * self.ep

    @property
    def microbatches(self) -> int:
        """Number of microbatches per replica."""
        return self.batch // (self.replicas * self.microbatch)
