"""Causal transformer (GPT-2's shape, or LLaMA's) as a list of blocks, any cut of which is a pipeline stage.

    ids (B,S) ─▶ Embedding ─▶ (B,S,D) ─▶ GptBlock × depth ─▶ (B,S,D) ─▶ GptHead ─▶ logits (B,S,V)

S is the length of a sequence, D is `hidden`, V the number of token ids. The targets of a data set are the inputs
shifted by one; the model does not shift. Names, initialisation from torch's global generator and the way in which
tensor parallelism cuts a block are as in `vit`. The options choose the layers of a block; `layers` has them:

                 GPT-2 (default)     LLaMA
    norm         layernorm           rmsnorm
    positions    learned             rope
    activation   gelu, gelu_tanh     swiglu
    kv_heads     as many as heads    fewer
    biases       true                false

A sequence may come in slices (`seq-1f1b`). Blocks are then passed `past`, with the number of earlier positions, which
concatenates the keys and values of an attention to those of the slices before:

    slice 0   q ◣        slice 1   q ■◣       row: a query of the slice; column: a key so far
              k  0                 k  0 1

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", with its initialisation;
Touvron et al. 2023, "LLaMA".

A causal transformer whose blocks, or every n-th of them, have a mixture of experts for their second half.

    every 1   [moe][moe][moe][moe]        every 2   [mlp][moe][mlp][moe]

All else is as in `gpt`. An expert is the MLP of the other blocks, without biases; a shared expert is applied to
every token, and is `shared_experts` times as wide.

Sources: Fedus et al. 2021, "Switch Transformers"; Jiang et al. 2024, "Mixtral of Experts" (`renormalise`); Dai et al.
2024, "DeepSeekMoE" (shared experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.strategies.descriptions.model import Experts, Model

from ..autograd.slice_kv_cache import Past
from ..data import DataSpec
from ..parallel.context.context_parallel import Context
from ..parallel.expert.moe import MoE
from ..settings.engine_settings import Settings
from .layers import NORM_EPSILON, ROTARY_BASE, Attention, Mlp, Rotary, SwiGlu, require_room

INITIAL_DEVIATION = 0.02
LAST_PRODUCTS = (".proj", ".fc2")
"""Suffixes of the layers whose output is added to the residual stream."""
_MLPS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"gelu": Mlp, "gelu_tanh": partial(Mlp, approximate="tanh"), "swiglu": SwiGlu}
)


class GPTOptions(Settings):
    """Sizes and variants of a causal transformer."""

    hidden: int = Field(default=64, ge=1)
    """Width of a token."""
    depth: int = Field(default=4, ge=1)
    """Number of transformer blocks; the embedding and the head are one block more each."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide `hidden`, unless `head_size` is given."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values, one per group of attention heads; must divide `heads`; none: as many as `heads`."""
    head_size: int | None = Field(default=None, ge=1)
    """Features of a head; none: hidden / heads."""
    mlp_ratio: int | None = Field(default=None, ge=1)
    """Width between the two linear layers of the MLP, as a multiple of `hidden`; none: 4, unless `ffn` is given."""
    ffn: int | None = Field(default=None, ge=1)
    """Width between the two linear layers of the MLP; none: mlp_ratio · hidden. Experts have it, too."""
    biases: bool = True
    """Whether linear layers have biases; routers, experts and the head never have."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation of tokens; rmsnorm neither centres them nor has a bias."""
    positions: Literal["learned", "rope"] = "learned"
    """Positions as vectors that are learned and added to the tokens, or as rotations of queries and keys."""
    rope_base: float = Field(default=ROTARY_BASE, gt=1)
    """Base of the frequencies of these rotations."""
    qk_norm: bool = False
    """Whether an RMSNorm is applied to each head's queries and keys (Qwen3)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Activation between the two linear layers of the MLP: a GELU, its approximation by tanh as in GPT-2's weights, or
    swiglu, which needs gates, and so a first layer twice as wide."""
    tied: bool = False
    """Whether the head uses the embedding's weight; the engine then keeps the two equal."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of features that training drops from embedded tokens, and from the output of each half of a block."""

    @model_validator(mode="after")
    def _sizes_divide(self) -> GPTOptions:
        if self.ffn is not None and self.mlp_ratio is not None:
            raise UsageError(f"gpt: ffn={self.ffn} and mlp_ratio={self.mlp_ratio} both give the MLP's width; omit one")
        if self.head_size is None and self.hidden % self.heads:
            raise UsageError(f"gpt: hidden={self.hidden} does not divide into heads={self.heads}; or give head_size")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UsageError(f"gpt: heads={self.heads} does not divide into groups for kv_heads={self.kv_heads}")
        if self.positions == "rope" and self.head_width % 2:
            raise UsageError(
                f"gpt: rope turns pairs of features, but a head has {self.head_width} "
                f"(hidden={self.hidden}, heads={self.heads})"
            )
        return self

    @property
    def mlp_width(self) -> int:
        """Width between the two linear layers of the MLP."""
        return (self.mlp_ratio or 4) * self.hidden if self.ffn is None else self.ffn

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size


def gpt(data: DataSpec, options: GPTOptions) -> list[Callable[[], nn.Module]]:
    """Return one builder per block: the embedding, `depth` transformer blocks and the head.

    `data.input_shape` is (S,), the longest sequence; `data.num_classes` is the number of token ids.
    Raises MisfitError where the samples are not sequences.
    """
    if len(data.input_shape) != 1:
        raise MisfitError(f"gpt needs sequences of token ids (S,), but a sample has the shape {data.input_shape}")
    length = data.input_shape[0]
    longest = length if options.positions == "learned" else None
    return [
        partial(Embedding, data.num_classes, longest, options.hidden, options.dropout),
        *[partial(GptBlock, options, length)] * options.depth,
        partial(GptHead, options, data.num_classes),
    ]


def gpt_tied(options: GPTOptions) -> dict[str, tuple[str, ...]]:
    """Return the tied weights, by their names in the whole model."""
    return {"embedding": ("0.tokens.weight", f"{options.depth + 1}.head.weight")} if options.tied else {}


def gpt_sizes(data: DataSpec, options: GPTOptions) -> Model:
    """Return the model's sizes, for predictions."""
    return Model(
        name="gpt",
        layers=options.depth,
        hidden=options.hidden,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_size=options.head_size,
        ffn=options.mlp_width,
        biases=options.biases,
        qk_norm=options.qk_norm,
        activation="swiglu" if options.activation == "swiglu" else "gelu",
        vocab=data.num_classes,
        positions=options.positions,
        seq=data.input_shape[0],
        tied=options.tied,
        norm=options.norm,
        dropout=options.dropout > 0,
    )


class Embedding(nn.Module):
    """Token ids to tokens: int64 (B, S) → (B, S, D); learned positions are added unless `length` is None."""

    tensor_parallel: ClassVar = {"tokens": "vocabulary"}

    def __init__(self, num_tokens: int, length: int | None, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, hidden)
        self.positions = None if length is None else nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        _initialise(self)

    def forward(self, ids: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        """Embed the ids; their positions start behind those of the slices before, or are those of the context.

        Raises MisfitError for a sequence that is too long.
        """
        embedded: Tensor = self.tokens(ids)
        if self.positions is not None:
            embedded = embedded + self._learned(self.positions, ids, past, context)
        dropped: Tensor = self.dropout(embedded)
        return dropped

    def _learned(self, positions: nn.Embedding, ids: Tensor, past: Past | None, context: Context | None) -> Tensor:
        start = 0 if past is None else past.seen
        end = start + ids.shape[1] if context is None else context.length
        require_room(end, positions.num_embeddings)
        places = torch.arange(start, end, device=ids.device) if context is None else context.positions
        learned: Tensor = positions(places)
        return learned


class GptBlock(nn.Module):
    """A pre-norm transformer block for sequences of at most `length`: (B, S, D) → (B, S, D).

    Output layers of both halves are initialized smaller the deeper the model. The second half is `mlp`, by default that
    of the options; if it returns an auxiliary loss beside its output, so does the block.
    """

    def __init__(self, options: GPTOptions, length: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = _norm(options)
        self.attention = _attention(options, length)
        self.norm2 = _norm(options)
        self.mlp = feed_forward(options, options.mlp_width, bias=options.biases) if mlp is None else mlp
        self.dropout1, self.dropout2 = nn.Dropout(options.dropout), nn.Dropout(options.dropout)
        _initialise(self)
        for name, layer in self.named_modules():
            if name.endswith(LAST_PRODUCTS) and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=INITIAL_DEVIATION / sqrt(2 * options.depth))

    def forward(
        self,
        tokens: Tensor,
        past: Past | None = None,
        context: Context | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attend to earlier positions, then transform each token; both are residual.

        With `document_ids`, int64 (B, S), attention is kept within documents.
        """
        mixed = self.attention(self.norm1(tokens), past, context, document_ids)
        attended: Tensor = tokens + self.dropout1(mixed)
        added = self.mlp(self.norm2(attended))
        output, auxiliary = added if isinstance(added, tuple) else (added, None)
        out: Tensor = attended + self.dropout2(output)
        return out if auxiliary is None else (out, auxiliary)


def feed_forward(options: GPTOptions, width: int, *, bias: bool) -> nn.Module:
    """Return the MLP of the options, `width` features wide in the middle."""
    return _MLPS[options.activation](options.hidden, width, bias=bias)


class GptHead(nn.Module):
    """Logits of the next token: (B, S, D) → (B, S, V). `head` has the embedding's shape and no bias."""

    tensor_parallel: ClassVar = {"head": "vocabulary"}

    def __init__(self, options: GPTOptions, num_tokens: int) -> None:
        super().__init__()
        self.norm = _norm(options)
        self.head = nn.Linear(options.hidden, num_tokens, bias=False)
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Normalise, and project to the token ids."""
        out: Tensor = self.head(self.norm(tokens))
        return out


def _attention(options: GPTOptions, length: int) -> Attention:
    has_rope = options.positions == "rope"
    return Attention(
        options.hidden,
        options.heads,
        options.kv_heads,
        Rotary(options.head_width, length, options.rope_base) if has_rope else None,
        head_dim=options.head_width,
        bias=options.biases,
        qk_norm=options.qk_norm,
    )


def _norm(options: GPTOptions) -> nn.Module:
    kind = nn.LayerNorm if options.norm == "layernorm" else nn.RMSNorm
    return kind(options.hidden, eps=NORM_EPSILON)


def _initialise(module: nn.Module) -> None:
    """Draw the weights of all linear layers and embeddings from the same distribution; biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


class MoEGPTOptions(GPTOptions):
    """Sizes and variants of a causal transformer with experts."""

    experts: int = Field(default=8, ge=1)
    """Experts of a block; ep must divide them."""
    top_k: int = Field(default=2, ge=1)
    """Experts that a token uses."""
    renormalise: bool = False
    """Whether the weights of a token's experts add up to 1; not with one expert, which would then have no gradient."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Capacity of an expert, relative to an even load of a rank's assignments; the rest is dropped; none: no limit."""
    pad_to_capacity: bool = False
    """Whether each expert's rows are padded to its capacity, by repeats, so that the host never waits for routing."""
    shared_experts: int = Field(default=0, ge=0)
    """Number of experts that are applied to every token."""
    every: int = Field(default=1, ge=1)
    """k, where every k-th block has experts."""
    balance: float = Field(default=0.01, ge=0)
    """Coefficient of the load-balancing loss, which is least where all experts are chosen equally often."""
    z: float = Field(default=0.001, ge=0)
    """Coefficient of the loss that keeps the router's logits small (z-loss)."""

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
    """Return the model's sizes, for predictions."""
    experts = Experts(
        count=options.experts,
        top_k=options.top_k,
        ffn=options.mlp_width,
        shared=options.shared_experts,
        every=options.every,
        padded_to=options.capacity_factor if options.pad_to_capacity else None,
    )
    return gpt_sizes(data, options).model_copy(update={"name": "moe-gpt", "experts": experts})


def _block(options: MoEGPTOptions, length: int) -> GptBlock:
    width = options.mlp_width * options.shared_experts
    mixture = MoE(
        options.hidden,
        options.experts,
        partial(feed_forward, options, options.mlp_width, bias=False),
        top_k=options.top_k,
        renormalise=options.renormalise,
        capacity_factor=options.capacity_factor,
        pad_to_capacity=options.pad_to_capacity,
        balance=options.balance,
        z=options.z,
        shared=feed_forward(options, width, bias=False) if width else None,
    )
    return GptBlock(options, length, mixture)
