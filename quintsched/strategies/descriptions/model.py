"""Transformer by its sizes: the input of a prediction, without weights.

    {"name": "llama-2-7b", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000,
     "activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "biases": false, "tied": false}

The names of Hugging Face and Megatron for the same sizes (`hidden_size`, `num_layers`, `n_heads` …) are accepted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from quintsched.files.user_records import RecordMetaclass

Flag = Annotated[bool, Field(strict=True)]
Size = Annotated[int, Field(ge=1, le=2**31, strict=True)]
Layers = Annotated[int, Field(ge=1, le=2**14, strict=True)]
Count = Annotated[int, Field(ge=0, le=2**31, strict=True)]
"""Size that may be 0."""
RankCount = Annotated[int, Field(ge=1, le=2**31)]
"""Number of ranks as a key of an object, which JSON writes as text."""
Figure = Annotated[float, Field(gt=1e-12, le=1e15, strict=True)]
"""Positive figure from a measurement or a datasheet, with generous bounds that keep results finite."""
Amount = Annotated[float, Field(ge=0, le=1e24, strict=True)]
"""Seconds, bytes or operations, at least 0."""


class Description(BaseModel, metaclass=RecordMetaclass):
    """Base class of frozen records that refuse unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, allow_inf_nan=False
    )


def _also(*names: str) -> AliasChoices:
    return AliasChoices(*names)


class Experts(Description):
    """A mixture of experts in place of the feed-forward network."""

    count: Size
    """Number of experts that the router chooses from."""
    top_k: Size
    """Number of experts per token."""
    ffn: Size
    """Width of one expert's feed-forward network."""
    shared: Count = 0
    """Number of shared experts of that width that every token passes besides."""
    first_dense: Count = 0
    """Number of layers at the beginning with a plain feed-forward network instead."""
    every: Size = 1
    """Interval k: every k-th of the remaining layers has experts, the others a plain network."""
    nodes: Size | None = None
    """Most nodes that a token's experts are on, by limited routing; None: any."""
    shared_gate: Flag = False
    """Whether the shared experts' output is gated, by a number that the router makes for each token (Qwen3-Next)."""
    padded_to: Figure | None = None
    """Capacity factor: rows per expert relative to an even load, by padding and dropping; None: dropless routing."""

    @property
    def rows(self) -> float:
        """Rows that all experts together compute per token at even load; at most one per expert."""
        return float(self.top_k) if self.padded_to is None else min(self.padded_to * self.top_k, float(self.count))


class LatentAttention(Description):
    """Latent attention: keys and values are compressed into a latent vector (DeepSeek-V2, arXiv:2405.04434)."""

    kv_rank: Size
    """Width of the latent vector of keys and values."""
    q_rank: Count = 0
    """Width of the latent vector of queries; 0: queries are projected directly."""
    rope_size: Size = 64
    """Width per head of the part with rotary position."""
    value_size: Size = 128
    """Width of each head's values."""


CHUNK = 64
"""Tokens of a chunk in which a delta net is computed by matrix products (flash-linear-attention)."""


class DeltaNet(Description):
    """Gated delta net in place of attention, with a matrix as state (arXiv:2412.06464; Qwen3-Next)."""

    except_every: Size
    """Interval k: every k-th layer has attention instead."""
    key_heads: Size
    """Number of heads of queries and keys."""
    value_heads: Size
    """Number of heads of values, each with a state of key_size × value_size."""
    key_size: Size = 128
    value_size: Size = 128
    convolution: Size = 4
    """Tokens that the convolution of queries, keys and values spans."""

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


class LayerKind(NamedTuple):
    """Kind of a layer: whether it has experts in place of the plain network, and a delta net in place of attention."""

    experts: bool
    delta: bool = False


PLAIN = LayerKind(False)


class Images(Description):
    """Input of a vision transformer, in place of tokens."""

    size: Size
    """Edge of an image, in pixels."""
    patch: Size
    """Edge of a patch, in pixels."""
    channels: Size = 3
    classes: Size = 1000

    @property
    def tokens(self) -> int:
        """Number of patches of an image, and the class token."""
        return (self.size // self.patch) ** 2 + 1


class Model(Description):
    """Transformer by its sizes; see the module. Raises pydantic's error, which `presets_and_files` converts."""

    name: str = "model"
    layers: Layers = Field(validation_alias=_also("layers", "num_layers", "num_hidden_layers", "n_layers", "n_layer"))
    hidden: Size = Field(validation_alias=_also("hidden", "hidden_size", "d_model", "n_embd"))
    heads: Size = Field(validation_alias=_also("heads", "num_heads", "num_attention_heads", "n_heads", "n_head"))
    kv_heads: Size | None = Field(
        default=None, validation_alias=_also("kv_heads", "num_key_value_heads", "num_query_groups")
    )
    """Number of key-value heads (GQA); None: as many as `heads`."""
    head_size: Size | None = Field(default=None, validation_alias=_also("head_size", "head_dim", "kv_channels"))
    """Width of a head; None: hidden / heads."""
    ffn: Size | None = Field(default=None, validation_alias=_also("ffn", "ffn_hidden_size", "intermediate_size"))
    """Width of the feed-forward network; None: 4 · hidden."""
    activation: Literal["gelu", "relu", "swiglu", "geglu"] = "gelu"
    """Activation of the feed-forward network; those with "glu" have a second matrix, the gate."""
    vocab: Count = Field(
        default=51200, validation_alias=_also("vocab", "vocab_size", "vocabulary", "padded_vocab_size")
    )
    """Vocabulary size; 0 for models of images."""
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"
    rope_base: Figure = Field(default=10_000.0, validation_alias=_also("rope_base", "rope_theta", "rotary_base"))
    """Base of rotary frequencies: it costs nothing, and is written into jobs and arguments."""
    seq: Size = Field(
        default=2048, validation_alias=_also("seq", "seq_length", "max_position_embeddings", "n_positions")
    )
    """Longest sequence: rows of a learned position embedding, and the default sequence of a strategy."""
    extra_positions: Count = 0
    """Rows of a learned position embedding beyond those of the sequence (2 in OPT)."""
    embedding_norm: Flag = False
    """Whether a norm follows the embedding (BLOOM)."""
    tied: Flag = True
    """Whether the head's matrix is tied to the embedding."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_biases: Flag = True
    """Whether a layernorm has biases; an rmsnorm has none."""
    biases: Flag = True
    """Whether projections have biases; routers and experts never have."""
    qkv_biases: Flag | None = None
    """Whether the projections to queries, keys and values have biases (Qwen); None: as `biases`."""
    qk_norm: Flag = False
    """Whether a norm is applied to each head's queries and keys (Qwen3)."""
    attention_gate: Flag = False
    """Whether a gate, made beside the queries, multiplies the output of attention (Qwen3-Next)."""
    dropout: Flag = True
    """Whether dropout masks are kept for the backward."""
    causal: Flag = True
    attention: Literal["unfused", "flash", "flash2"] = "flash2"
    """Attention kernel: "flash2" (arXiv:2307.08691) and "flash", with slower kernels, before July 2023
    (arXiv:2205.14135), do not materialise scores; "unfused" does (Megatron before 2023)."""
    window: Size | None = None
    """Most keys that a query attends to in layers with a sliding window; None: no layer has one."""
    window_except: Count = 0
    """Interval k: every k-th layer attends to all keys in spite of `window`; 0: none does."""
    sinks: Flag = False
    """Whether the softmax of attention has a learned sink, one number for each head (GPT-OSS)."""
    repeated_keys: Flag = False
    """Whether keys and values are repeated for all heads before the ring of cp passes them on (torchtitan's Llama)."""
    parallel_block: Literal[0, 1, 2] = 0
    """Number of norms of a layer whose attention and feed-forward network run side by side, on the same input (GPT-J,
    Falcon 7B and Cohere: 1, GPT-NeoX and Falcon 40B: 2); 0: one follows the other."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    delta: DeltaNet | None = None
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
        if self.window is not None and (self.attention == "unfused" or not self.causal):
            yield "window is for causal attention that is fused"
        if self.sinks and self.latent is not None:
            yield "sinks are not described for latent attention"
        if self.delta is not None and (len(set(self.has_experts)) > 1 or self.latent or self.attention == "unfused"):
            yield "a delta net is described beside fused attention, not latent, with experts in all layers or in none"
        if self.delta is not None and self.delta.value_heads % self.delta.key_heads:
            yield f"value_heads={self.delta.value_heads} does not divide into key_heads={self.delta.key_heads}"
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
        """Number of key-value heads; `heads` for latent attention."""
        return self.heads if self.kv_heads is None or self.latent is not None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head's queries and keys; for latent attention, without the rotary part."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def query_width(self) -> int:
        """Width of a head's queries and keys, with the rotary part of latent attention."""
        return self.head_width + (self.latent.rope_size if self.latent else 0)

    @property
    def biases_of_queries(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.biases if self.qkv_biases is None else self.qkv_biases

    @property
    def ffn_width(self) -> int:
        """Width of the plain feed-forward network."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def is_gated(self) -> bool:
        """Whether a feed-forward network has a gate: three matrices, not two."""
        return self.activation.endswith("glu")

    @property
    def norms(self) -> int:
        """Number of norms of a layer."""
        return self.parallel_block or 2

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers, one or two: without experts and with, or with a delta net and with attention."""
        if self.delta is not None:
            mixes = self.experts is not None
            return (LayerKind(mixes, delta=True), LayerKind(mixes))
        return (PLAIN, LayerKind(True))[: 1 + (self.experts is not None)]

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Place of each layer's kind in `kinds`."""
        if self.delta is not None:
            return tuple(int((layer + 1) % self.delta.except_every == 0) for layer in range(self.layers))
        return tuple(map(int, self.has_experts))

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts in place of the plain feed-forward network."""
        if self.experts is None:
            return (False,) * self.layers
        first, every = self.experts.first_dense, self.experts.every
        return tuple(layer >= first and (layer - first + 1) % every == 0 for layer in range(self.layers))
