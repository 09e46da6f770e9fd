"""A transformer by its sizes: what a prediction needs to know of a model, and nothing of its weights.

    {"name": "llama-2-7b", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000,
     "activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "biases": false, "tied": false}

The names that Hugging Face and Megatron give to the same sizes (`hidden_size`, `num_layers`, `n_heads` …) are read too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from quintsched.files.records import Named

Size = Annotated[int, Field(ge=1, le=2**31, strict=True)]
Layers = Annotated[int, Field(ge=1, le=2**14, strict=True)]
Count = Annotated[int, Field(ge=0, le=2**31)]
"""A size that may be 0."""
Ranks = Annotated[int, Field(ge=1, le=2**31)]
"""A size that is a key of an object, where JSON writes it as text."""
Figure = Annotated[float, Field(gt=1e-12, le=1e15)]
"""What was measured, or stands in a datasheet: far beyond what there is, and far from what no number holds."""
Amount = Annotated[float, Field(ge=0, le=1e24)]
"""Seconds, bytes or operations, of which there may be none."""


class Description(BaseModel, metaclass=Named):
    """A frozen record that refuses what it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, allow_inf_nan=False
    )


def _also(*names: str) -> AliasChoices:
    return AliasChoices(*names)


class Experts(Description):
    """A mixture of experts in place of the feed-forward network."""

    count: Size
    """Experts that a router chooses among."""
    top_k: Size
    """Experts that each token passes."""
    ffn: Size
    """Width of one expert's feed-forward network."""
    shared: Count = 0
    """Experts of that width that every token passes besides."""
    first_dense: Count = 0
    """How many layers at the beginning have a plain feed-forward network instead."""
    every: Size = 1
    """k: every k-th of the remaining layers has experts, the others a plain network."""
    padded_to: Figure | None = None
    """How many times an even load every expert is given, by padding and dropping; none: what is routed to it."""

    @property
    def rows(self) -> float:
        """How many rows all experts compute for each token, their loads being even; at most one each."""
        return float(self.top_k) if self.padded_to is None else min(self.padded_to * self.top_k, float(self.count))


class LatentAttention(Description):
    """Keys and values compressed into a latent vector (DeepSeek-V2, arXiv:2405.04434)."""

    kv_rank: Size
    """Width of the latent of keys and values."""
    q_rank: Count = 0
    """Width of the latent of queries; 0: queries are projected directly."""
    rope_size: Size = 64
    """Of each head, what carries the position."""
    value_size: Size = 128
    """Of each head's values."""


class Images(Description):
    """What a vision transformer reads instead of words."""

    size: Size
    """Pixels along an edge."""
    patch: Size
    """Pixels along a patch's edge."""
    channels: Size = 3
    classes: Size = 1000

    @property
    def tokens(self) -> int:
        """Patches of an image, and the class token."""
        return (self.size // self.patch) ** 2 + 1


class Model(Description):
    """A transformer; see the module. Raises pydantic's error, which `library` turns into ours."""

    name: str = "model"
    layers: Layers = Field(validation_alias=_also("layers", "num_layers", "num_hidden_layers", "n_layers", "n_layer"))
    hidden: Size = Field(validation_alias=_also("hidden", "hidden_size", "d_model", "n_embd"))
    heads: Size = Field(validation_alias=_also("heads", "num_heads", "num_attention_heads", "n_heads", "n_head"))
    kv_heads: Size | None = Field(
        default=None, validation_alias=_also("kv_heads", "num_key_value_heads", "num_query_groups")
    )
    """Heads of keys and values, where several heads of queries use one (GQA); None: as many as `heads`."""
    head_size: Size | None = Field(default=None, validation_alias=_also("head_size", "head_dim", "kv_channels"))
    """None: hidden / heads."""
    ffn: Size | None = Field(default=None, validation_alias=_also("ffn", "ffn_hidden_size", "intermediate_size"))
    """Width of the feed-forward network; None: 4 · hidden."""
    activation: Literal["gelu", "relu", "swiglu", "geglu"] = "gelu"
    """Of the feed-forward network; those with "glu" have a second matrix, the gate."""
    vocab: Count = Field(
        default=51200, validation_alias=_also("vocab", "vocab_size", "vocabulary", "padded_vocab_size")
    )
    """0 where images are read."""
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"
    seq: Size = Field(
        default=2048, validation_alias=_also("seq", "seq_length", "max_position_embeddings", "n_positions")
    )
    """The longest sequence: rows of a learned position embedding, and the sequence where a strategy gives none."""
    extra_positions: Count = 0
    """Rows of a learned position embedding beyond those of the sequence (2 in OPT)."""
    embedding_norm: bool = False
    """A norm right behind the embedding (BLOOM)."""
    tied: bool = True
    """Whether the head's matrix is the embedding's."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_biases: bool = True
    """Of a layernorm; an rmsnorm has none."""
    biases: bool = True
    """Of the projections; routers and experts have none whatever this says."""
    qkv_biases: bool | None = None
    """Of the projections to queries, keys and values alone (Qwen); None: as `biases`."""
    qk_norm: bool = False
    """A norm over each head's queries and keys (Qwen3)."""
    dropout: bool = True
    """Whether masks of dropout are kept for the backward."""
    causal: bool = True
    attention: Literal["unfused", "flash", "flash2"] = "flash"
    """"unfused" materialises scores (Megatron before 2023); "flash" does not (arXiv:2205.14135); "flash2" neither, in
    kernels that are faster (arXiv:2307.08691)."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    images: Images | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> Model:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        if self.head_size is None and self.hidden % self.heads:
            yield f"hidden={self.hidden} does not divide into heads={self.heads}; give head_size where they differ"
        if self.heads % self.num_kv_heads:
            yield f"heads={self.heads} does not divide into groups for kv_heads={self.num_kv_heads}"
        if self.vocab == 0 and self.images is None:
            yield "vocab is 0, which is for models that read images; give its size, or images"
        if self.experts is not None and self.experts.top_k > self.experts.count:
            yield f"a token cannot pass top_k={self.experts.top_k} of {self.experts.count} experts"
        if self.experts is not None and not any(self.has_experts):
            yield f"no layer of {self.layers} has experts with first_dense={self.experts.first_dense}" + (
                f" and every={self.experts.every}"
            )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and of values; `heads` where attention is latent."""
        return self.heads if self.kv_heads is None or self.latent is not None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Of a head's queries and keys; where attention is latent, without what carries the position."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def ffn_width(self) -> int:
        """Of the plain feed-forward network."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def is_gated(self) -> bool:
        """Whether a feed-forward network has a gate: three matrices, not two."""
        return self.activation.endswith("glu")

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Of each layer, whether it has experts in place of the plain feed-forward network."""
        if self.experts is None:
            return (False,) * self.layers
        first, every = self.experts.first_dense, self.experts.every
        return tuple(layer >= first and (layer - first + 1) % every == 0 for layer in range(self.layers))
