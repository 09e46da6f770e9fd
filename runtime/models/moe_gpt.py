"""A causal transformer whose blocks, or every n-th of them, have a mixture of experts for their second half.

    every 1   [moe][moe][moe][moe]        every 2   [mlp][moe][mlp][moe]

All else is as in `gpt`. Experts are what the MLP of the other blocks is, without biases; a shared expert is one that
every token passes, `shared_experts` times as wide.

Sources: Fedus et al. 2021, "Switch Transformers"; Jiang et al. 2024, "Mixtral of Experts" (`renormalise`); Dai et al.
2024, "DeepSeekMoE" (shared experts).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydantic import Field, model_validator
from torch import nn

from quintsched.errors import UsageError
from quintsched.strategies.descriptions.model import Experts, Model

from ..data import DataSpec
from ..parallel.expert.moe import MoE
from .gpt import Block, GPTOptions, feed_forward, gpt, gpt_sizes


class MoEGPTOptions(GPTOptions):
    """The sizes and the variants of a causal transformer with experts."""

    experts: int = Field(default=8, ge=1)
    """Experts of a block; ep must divide them."""
    top_k: int = Field(default=2, ge=1)
    """Experts that a token uses."""
    renormalise: bool = False
    """Whether the weights of a token's experts add up to 1; not with one expert, which would then have no gradient."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """How many times an even load of a rank's assignments an expert takes; the rest is dropped; none: no limit."""
    pad_to_capacity: bool = False
    """Whether every expert is given as many rows as it takes, by repeats, so that the host never waits for routing."""
    shared_experts: int = Field(default=0, ge=0)
    """Experts that every token passes."""
    every: int = Field(default=1, ge=1)
    """k, where every k-th block has experts."""
    balance: float = Field(default=0.01, ge=0)
    """Coefficient of the loss that is least where all experts are chosen equally often."""
    z: float = Field(default=0.001, ge=0)
    """Coefficient of the loss that keeps the router's logits small."""

    @model_validator(mode="after")
    def _experts_suffice(self) -> MoEGPTOptions:
        if self.top_k > self.experts:
            raise UsageError(f"moe-gpt: a token cannot use top_k={self.top_k} of experts={self.experts}")
        if self.renormalise and self.top_k == 1:
            raise UsageError("moe-gpt: with top_k=1 and renormalise every weight is 1, and the router learns nothing")
        if self.pad_to_capacity and self.capacity_factor is None:
            raise UsageError(
                "moe-gpt: pad_to_capacity wants a capacity_factor, which says how many rows an expert is given; with "
                f"capacity_factor={self.experts / self.top_k:g}, experts / top_k, nothing is dropped"
            )
        if self.every > self.depth:
            raise UsageError(f"moe-gpt: no block has experts, for every={self.every} is more than depth={self.depth}")
        return self


def moe_gpt(data: DataSpec, options: MoEGPTOptions) -> list[Callable[[], nn.Module]]:
    """Return one builder per block, as `gpt` does; raises the same."""
    blocks = gpt(data, options)
    length = data.input_shape[0]
    for number in range(options.every, options.depth + 1, options.every):
        blocks[number] = partial(_block, options, length)
    return blocks


def moe_gpt_sizes(data: DataSpec, options: MoEGPTOptions) -> Model:
    """Return the model by its sizes, for predictions."""
    experts = Experts(
        count=options.experts,
        top_k=options.top_k,
        ffn=options.hidden * options.mlp_ratio,
        shared=options.shared_experts,
        every=options.every,
        padded_to=options.capacity_factor if options.pad_to_capacity else None,
    )
    return gpt_sizes(data, options).model_copy(update={"name": "moe-gpt", "experts": experts})


def _block(options: MoEGPTOptions, length: int) -> Block:
    width = options.mlp_ratio * options.shared_experts
    mixture = MoE(
        options.hidden,
        options.experts,
        partial(feed_forward, options, bias=False),
        top_k=options.top_k,
        renormalise=options.renormalise,
        capacity_factor=options.capacity_factor,
        pad_to_capacity=options.pad_to_capacity,
        balance=options.balance,
        z=options.z,
        shared=feed_forward(options, width, bias=False) if width else None,
    )
    return Block(options, length, mixture)
