"""Bytes of activations that a block keeps of one microbatch for its backward, by kind.

    x ─ norm ─ q k v ─ scores ─ projection ─ mask ─ + ─ norm ─ up ─ activation ─ down ─ mask ─ + ─▶
    └─────────────── tokens (/ tp with sequence_parallel) ───────────────┘
                └─ attention, scores, ffn, experts: sharded over tp (/ tp) ──┘

With s tokens, b samples, h wide, t = tp, a heads, a GPT in 16 bits keeps (Korthikanti et al. 2022, arXiv:2205.05198)

    sbh (10 + 24/t + 5as/ht)        sequence parallel: sbh (34 + 5as/h) / t     selective recomputation: no 5as
    full recomputation: 2sbh, the block's input; with sequence parallelism 2sbh/t

This module also covers fewer key-value heads, gates, experts, latent attention and other precisions. Flash attention
keeps no scores, but one 32-bit number per head and token; without dropout there are no masks. Sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from quintsched.strategies.descriptions.model import CHUNK, PLAIN, LayerKind, Model

ACTIVATION_KINDS = ("tokens", "masks", "attention", "scores", "ffn", "experts", "router")

FP32 = 4
"""Bytes of elements kept in single precision, whatever the model's precision."""


@dataclass(frozen=True, eq=False)
class ActivationSizes:
    """Sizes of one microbatch on a rank: numbers, or arrays of one length."""

    microbatch: Any
    seq: Any
    tp: Any = 1
    cp: Any = 1
    sequence_parallel: Any = 0
    element: Any = 2
    """Bytes of an element of an activation."""
    short: Any = 0
    """Bytes of an element of the inputs of products with weights, if they are kept in 8 bits, else 0."""

    @property
    def kept(self) -> Any:
        """Bytes of an element of a product's input."""
        return np.where(np.asarray(self.short) > 0, self.short, self.element)

    @cached_property
    def tokens(self) -> Any:
        """Tokens of a microbatch on one rank of cp."""
        return self.microbatch * self.seq / self.cp

    @cached_property
    def between(self) -> Any:
        """Tokens of a rank outside of the tensor-parallel regions."""
        return self.tokens / np.where(np.asarray(self.sequence_parallel) > 0, self.tp, 1)


def block_kept(model: Model, sizes: ActivationSizes, kind: LayerKind = PLAIN, *, fused: bool = True) -> dict[str, Any]:
    """Return the bytes that a block keeps without recomputation, by those of `ACTIVATION_KINDS` that occur.

    `fused`: whether a gate and its activation are one kernel, as in Megatron-LM, Transformer Engine or after
    compilation; PyTorch's eager operators keep the activated gate too.
    """
    widths = _kept_widths(model, fused)
    element, between, inputs = sizes.element, sizes.between, 1 if model.parallel_block else 2
    found = {
        "tokens": between * (inputs * element + model.norms * sizes.kept) * model.hidden,  # of norms, and their outputs
        "attention": (_delta_net if kind.delta else _latent if model.latent else _attention)(model, sizes),
        "scores": np.zeros(1) if kind.delta else _scores(model, sizes),
    }
    if model.dropout:
        found["masks"] = between * model.hidden * 2
    if kind.experts:
        found["experts"], found["router"] = _experts(model, sizes, widths)
    else:
        found["ffn"] = _feed_forward(model, sizes, model.ffn_width, widths)
    return found


def block_rerun(
    model: Model, sizes: ActivationSizes, rerun: Mapping[str, Any], kind: LayerKind = PLAIN
) -> dict[str, Any]:
    """Return the bytes of these that recomputed modules do not keep, by kind; `rerun` has 1 for each, else 0."""
    found = {"tokens": rerun["layernorm"] * sizes.between * model.norms * sizes.kept * model.hidden}
    if model.attention == "unfused":
        found["scores"] = rerun["core_attn"] * _scores(model, sizes)
    if model.latent is not None:
        of_head = 2 * model.query_width + model.latent.value_size
        expanded = sizes.tokens * sizes.element * _share(model.heads, sizes.tp) * of_head
        found["attention"] = rerun["mla_up_proj"] * expanded
    activated = sizes.kept + (_kept_widths(model, fused=True) - 1) * (sizes.element - sizes.kept)
    if kind.experts and (experts := model.experts) is not None:
        of_row = _share(experts.ffn, sizes.tp) * activated + model.hidden * sizes.element
        shared = sizes.tokens * _share(experts.shared * experts.ffn, sizes.tp) * activated
        found["experts"] = rerun["moe_act"] * sizes.tokens * experts.rows * of_row + rerun["mlp_act"] * shared
    else:
        found["ffn"] = rerun["mlp_act"] * sizes.tokens * _share(model.ffn_width, sizes.tp) * activated
    return found


def block_input(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes of a block's input: kept by full recomputation, and sent between stages."""
    return sizes.between * sizes.element * model.hidden


def embedding_kept(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes that the embedding keeps: the mask of its dropout, the input of its norm."""
    each = model.dropout + sizes.element * model.embedding_norm
    return sizes.between * model.hidden * each


def head_kept(model: Model, sizes: ActivationSizes, *, fused: Any = 0) -> dict[str, Any]:
    """Return the bytes that the head keeps: the inputs of its norm and of its product, and logits.

    Logits are in 32 bits, or where the loss is `fused` in the model's precision.
    """
    tokens = {"tokens": sizes.between * sizes.element * model.hidden * 2}
    if model.images is not None:
        return tokens | {"logits": sizes.microbatch * model.images.classes * FP32}
    width = np.where(np.asarray(fused) > 0, sizes.element, FP32)
    return tokens | {"logits": sizes.tokens * width * _share(model.vocab, sizes.tp)}


def _attention(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes of queries, keys, values and the projection's input; qk norms keep queries and keys again.

    A gate and the output that it multiplies are kept besides.
    """
    queries = _share(model.heads, sizes.tp) * model.head_width
    keys = _share(model.num_kv_heads, sizes.tp) * model.head_width
    kept = queries + 2 * keys + (queries + keys if model.qk_norm else 0) + 2 * queries * model.attention_gate
    return sizes.tokens * (sizes.element * kept + sizes.kept * queries)


def _delta_net(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes that a gated delta net keeps (`chunk_gated_delta_rule` of flash-linear-attention).

    The convolution keeps its input; the rule its queries and keys for each head of values, the values, and for each
    token its part of a chunk's inverse, its decay and its rate; the gated norm its two inputs.
    """
    delta = model.delta
    assert delta is not None
    heads = delta.value_heads
    of_head = 2 * delta.key_size + CHUNK + 3 * delta.value_size + 1
    kept = sizes.element * (delta.convolved + heads * of_head) + FP32 * heads + sizes.kept * heads * delta.value_size
    return sizes.tokens * kept / sizes.tp


def delta_states(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes of a delta net's states, one for each head and chunk, which its backward computes again."""
    delta = model.delta
    assert delta is not None
    of_chunk = delta.value_heads * delta.key_size * delta.value_size
    return sizes.tokens / CHUNK * sizes.element * of_chunk / sizes.tp


def _latent(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes of latent vectors before and after their norms (replicated), and of this rank's heads."""
    latent = model.latent
    assert latent is not None
    heads = _share(model.heads, sizes.tp)
    of_head = 2 * model.query_width + latent.value_size
    ranks = latent.q_rank + latent.kv_rank
    in_products = heads * latent.value_size + ranks
    return sizes.tokens * (sizes.element * (heads * of_head + ranks + latent.rope_size) + sizes.kept * in_products)


def _scores(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes per pair of tokens, or, if scores are not materialised, per token."""
    heads = _share(model.heads, sizes.tp)
    if model.attention != "unfused":
        return sizes.tokens * heads * FP32
    of_pair = 2 * sizes.element + 1 if model.dropout else sizes.element
    return sizes.tokens * sizes.seq * heads * of_pair


def _feed_forward(model: Model, sizes: ActivationSizes, width: int, widths: int) -> Any:
    return sizes.tokens * _share(width, sizes.tp) * _inside(sizes, widths)


def _inside(sizes: ActivationSizes, widths: int) -> Any:
    """Return the bytes of a feed-forward network per unit of its width: the last is the input of its last product."""
    return sizes.element * (widths - 1) + sizes.kept


def _kept_widths(model: Model, fused: bool) -> int:
    """Return the kept elements of a feed-forward network, in units of its width."""
    if model.is_gated:
        return 3 if fused else 4
    return 1 if model.activation == "relu" else 2


def _experts(model: Model, sizes: ActivationSizes, widths: int) -> tuple[Any, Any]:
    """Return the bytes of routed tokens to and from the experts and inside them at even load, and of the router."""
    experts = model.experts
    assert experts is not None
    rows = sizes.tokens * experts.rows
    inside = _share(experts.ffn, sizes.tp) * _inside(sizes, widths)
    routed = rows * (model.hidden * (sizes.element + sizes.kept) + inside)
    shared = _feed_forward(model, sizes, experts.shared * experts.ffn, widths)
    return routed + shared, sizes.tokens * (FP32 * experts.count + 3 * FP32 * experts.top_k)


def _share(total: int, parts: Any) -> Any:
    """Return the largest of `parts` even parts."""
    return np.ceil(total / np.asarray(parts))
