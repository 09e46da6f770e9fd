"""A strategy: the mesh, and all else that a user chooses, of one training step.

    Strategy(gpus=1024, dp=16, tp=8, pp=8, microbatch=1, batch=1536, seq=2048, chunks=3, recompute="selective",
             sequence_parallel=True)

dp · tp · pp · cp · ep = gpus; the batch is cut over dp · ep replicas into microbatches of `microbatch` samples.
"""

from __future__ import annotations

from typing import Literal

from quintsched.strategies.descriptions.model import Count, Description, Size

Recompute = Literal["none", "selective", "full"] | Count | tuple[int, ...]
"""Of each stage's layers: none, the attention's scores alone, all, K of them, or a number for each stage."""


class Strategy(Description):
    """How a model is laid over GPUs; see the module. `placement.check` says whether it can be placed."""

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
    """None: "1f1b", or "interleaved-1f1b" with more than one chunk."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    overlap: bool = False
    """Whether replicas add up a stage's gradients beside the backwards of other stages; else they do so after all
    backwards, as in the runs that Megatron-LM's papers measured."""
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    stages: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as can be, what is left over going to the first."""

    @property
    def replicas(self) -> int:
        """How many share out the batch."""
        return self.dp * self.ep

    @property
    def microbatches(self) -> int:
        """Of each replica."""
        return self.batch // (self.replicas * self.microbatch)
