"""Strategy of one training step: the mesh, and all other choices of the user.

    Strategy(gpus=1024, dp=16, tp=8, pp=8, microbatch=1, batch=1536, seq=2048, chunks=3, recompute="selective",
             sequence_parallel=True)

dp · tp · pp · cp · ep = gpus; the batch is divided over dp · ep replicas into microbatches of `microbatch` samples.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quintsched.strategies.descriptions.model import Count, Description, Size

MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp_act")
"""Modules of a layer that recomputation may name, as Megatron-LM's `--recompute-modules` does: the scores of attention,
norms, the products that expand latent attention, the activation of experts (whose probabilities are then applied before
their last product, so that outputs are not kept), and of other feed-forward networks. With fp8, the inputs of
recomputed activations are kept in 8 bits."""
SHORT = {"fp8": 1.0, "mxfp8": 1 + 1 / 32}
"""Bytes of an element that products with weights read, by precision of 8 bits; with its share of the scale in blocks of
32 (Open Compute Project, Microscaling Formats 1.0)."""
DType = Literal["fp8", "mxfp8", "bf16", "fp16", "fp32", "fp64"]
WIDTHS = {"fp8": 2.0, "mxfp8": 2.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp64": 8.0}
"""Bytes of an element of weights and activations by dtype."""
_NAMED = "|".join(MODULES)
Modules = Annotated[str, Field(pattern=rf"^({_NAMED})(\+({_NAMED}))*$")]
"""Some of `MODULES`: "layernorm+moe_act"."""
RecomputeRule = Literal["none", "selective", "full"] | Modules | Count | tuple[int, ...]
"""Recomputed layers of each stage: none, attention's scores only, some modules of each layer, all, a number of layers,
or a number per stage."""


def modules_of(recompute: object) -> tuple[str, ...]:
    """Return the modules of each layer that are recomputed."""
    if recompute == "selective":
        return ("core_attn",)
    names = tuple(str(recompute).split("+"))
    return names if set(names) <= set(MODULES) else ()


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
    recompute: RecomputeRule = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    zero_every: Size = 1
    """With ZeRO-2 and 3, number of microbatches after which gradients are reduced; until then they are accumulated."""
    overlap: bool = True
    """Whether replicas reduce gradients layer by layer during backwards and gather updated weights during forwards, and
    interleaved 1F1B sends during both; else all of it is waited for, as in the runs of Megatron-LM's papers."""
    pp_duplex: bool = True
    """Whether a rank sends a message and receives one at once, as in Megatron-LM; else as in DeepSpeed's pipeline: each
    waits for the other, slices of tp are gathered again, and gradients are copied before they are added up."""
    ep_overlap: bool = False
    """Whether the exchange of tokens with experts runs beside another microbatch's computation under interleaved 1F1B,
    as with Megatron-LM's `--overlap-moe-expert-parallel-comm`; DualPipe always does so."""
    tp_overlap: bool = True
    """Whether the reduction of an input's gradient over tp runs beside the product for the weight's gradient, as in
    Megatron-LM since 2022."""
    fused_accumulation: bool = False
    """Whether the product that makes a weight's gradient also adds it to the sum of earlier microbatches, as in
    Megatron-LM since 2022 (`gradient_accumulation_fusion`); else that is a pass of its own."""
    fused_loss: bool = False
    """Whether the cross-entropy is one kernel that writes the gradient of logits in their place."""
    dtype: DType = "bf16"
    """Precision of computation; "fp8": of products with weights in a layer (with the exchange and the kept inputs of
    these), all else in bf16; "mxfp8": the same, with a scale for each 32 numbers."""
    gradients: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    """Precision in which gradients are accumulated and reduced; None: 32 bits at least, fp16 reduced in its own."""
    offload: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most activations that a rank holds, in microbatches of a whole rank: others are copied to the host's memory and
    back, as by `compile --offload`; None: no limit."""
    stages: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as possible; see `strategy_validity.stage_layers`."""

    @property
    def replicas(self) -> int:
        """Number of replicas that share the batch."""
        return self.dp * self.ep

    @property
    def microbatches(self) -> int:
        """Number of microbatches per replica."""
        return self.batch // (self.replicas * self.microbatch)
