"""Exact bytes that autograd keeps for the built-in models in this project's runtime on a CPU.

    as in `activations`, and in addition
    norms        mean and deviation of every row; an rmsnorm keeps its input twice, in 32 bits at least
    rotations    queries and keys once more, and the attention output in the order of heads; with cp, sines and cosines
    cp           the attention output once more: the ring's result, and the projection's input
    experts      their outputs; logits, probabilities, choices and weights of the router
    ends         positions, ids and masks of a sharded vocabulary, the loss

With recomputation a stage keeps its input, and runs all its blocks again before its backward: then a rank holds one
microbatch of that stage in full. ZeRO gathers and reduces whole stages. Sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quintsched.strategies.descriptions.model import LayerKind, Model
from quintsched.strategies.prediction.memory.activations import (
    FP32,
    ActivationSizes,
    block_input,
    block_kept,
    head_kept,
)
from quintsched.strategies.prediction.memory.peak_memory import RankLayers, Sharding

INDEX_BYTES = 8
"""Bytes of an index."""


def own_activations(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> dict[str, Any]:
    """Return the peak bytes that autograd keeps on a rank, by kind, at even loads of experts.

    If blocks are recomputed, all of a stage are.
    """
    recomputes = np.asarray(ranks.full_dense + ranks.full_mixture) > 0
    found: dict[str, Any] = {}
    for kind, bytes_ in _layers(model, sizes, ranks).items():
        found[f"activations_{kind}"] = bytes_ * np.where(recomputes, 1.0 / mesh.chunks, ranks.in_flight)
    first = ranks.first * np.where(recomputes, 1.0, ranks.first_in_flight)
    last = ranks.last * np.where(recomputes, 1.0, ranks.logits_in_flight)
    inputs = (mesh.chunks - ranks.first) * block_input(model, sizes)
    found["activations_inputs"] = np.where(recomputes, ranks.stages_in_flight - 1.0 / mesh.chunks, 0.0) * inputs
    found["activations_embedding"] = first * _embedding(model, sizes)
    found["activations_head"] = last * _head(model, sizes)
    found["logits"] = ranks.last * ranks.logits_in_flight * _loss(model, sizes)
    return found


def own_gathered(whole: Mapping[str, Any], sizes: ActivationSizes, mesh: Sharding) -> Any:
    """Return the bytes that ZeRO makes resident for a while: a stage's full weights, and gradients before reduction.

    `whole` has the terms of the same rank without sharding.
    """
    zero, is_shared = np.asarray(mesh.zero), mesh.dp * sizes.cp * mesh.ep > 1
    weights = np.where(zero >= 3, whole["weights"], 0.0)
    gradients = np.where((zero >= 2) & (np.asarray(mesh.pending) == 0), whole["gradients"], 0.0)
    return np.where(is_shared, (weights + gradients) / mesh.chunks, 0.0)


def _layers(model: Model, sizes: ActivationSizes, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes that the layers of a rank keep of one microbatch, by kind."""
    found: dict[str, Any] = {}
    for kind, count in zip(model.kinds, (ranks.dense, ranks.mixture), strict=False):
        if np.any(np.asarray(count) > 0):
            for term, bytes_ in own_block(model, sizes, kind).items():
                found[term] = found.get(term, 0) + count * bytes_
    return found


def own_block(model: Model, sizes: ActivationSizes, kind: LayerKind) -> dict[str, Any]:
    """Return the bytes that one block keeps, by kind."""
    found = block_kept(model, sizes, kind, fused=False)
    found["statistics"] = 2 * _norm(model, sizes.between, sizes.element)
    found["attention"] = found["attention"] + _attention_copies(model, sizes)
    if kind.experts:
        _add_experts(model, sizes, found)
    return found


def _norm(model: Model, rows: Any, element: Any) -> Any:
    """Return the bytes that a norm keeps besides its input and output in the model's precision."""
    if model.norm == "layernorm":
        return 2 * rows * element
    wide = np.maximum(element, FP32)
    return rows * (2 * wide - element) * model.hidden + rows * wide


def _attention_copies(model: Model, sizes: ActivationSizes) -> Any:
    heads, keys = model.heads / sizes.tp, model.num_kv_heads / sizes.tp
    of_head = sizes.tokens * sizes.element * model.head_width
    # With equal numbers of heads, queries, keys and values are views of one product, which the values keep alive.
    turned = heads + keys if model.positions == "rope" and model.heads == model.num_kv_heads else 0
    copied = np.where((np.asarray(sizes.cp) > 1) | (model.positions == "rope"), heads, 0)
    is_rope_on_ring = (model.positions == "rope") & (np.asarray(sizes.cp) > 1)
    tables = np.where(is_rope_on_ring, 2 * sizes.seq / sizes.cp * model.head_width * sizes.element, 0)
    return of_head * (turned + copied) + tables


def _add_experts(model: Model, sizes: ActivationSizes, found: dict[str, Any]) -> None:
    """Add the experts' outputs, and replace the router's terms."""
    experts, tokens, element = model.experts, sizes.tokens, sizes.element
    assert experts is not None
    choices = tokens * experts.top_k
    found["experts"] = found["experts"] + choices * element * model.hidden
    is_short = np.asarray(element) < FP32
    rounded = np.where(is_short, tokens * model.hidden * FP32 + experts.count * model.hidden * FP32, 0)
    unkept = np.where(is_short & (experts.shared == 0), tokens * model.hidden * element, 0)
    likelihoods = tokens * (2 * experts.count + 1) * FP32 + experts.count * FP32
    found["router"] = likelihoods + choices * (2 * INDEX_BYTES + np.minimum(element, FP32)) + rounded - unkept
    if experts.padded_to is not None:  # rows out and rows back have indices of their own, and a mask marks dropped rows
        rows = tokens * experts.rows
        found["router"] = found["router"] + rows * INDEX_BYTES + choices
        found["experts"] = found["experts"] - rows * element * model.hidden


def _embedding(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes that the embedding keeps: patches, or positions, and with a sharded vocabulary ids and a mask.

    Dropout's mask covers all tokens, even if sequence parallelism divides them in blocks.
    """
    masks = sizes.tokens * model.hidden * model.dropout
    if model.images is not None:
        pixels = model.images.channels * model.images.patch**2
        return sizes.microbatch * (model.images.tokens - 1) * pixels * sizes.element + masks
    cut = np.where(np.asarray(sizes.tp) > 1, sizes.tokens * (INDEX_BYTES + 1), 0)
    return cut + masks + (INDEX_BYTES * sizes.seq / sizes.cp if model.positions == "learned" else 0)


def _head(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes that the head keeps, for all tokens, even if sequence parallelism divides them in blocks."""
    element = sizes.element
    if model.images is not None:
        own = sizes.microbatch * (model.hidden * element + 2 * element)
        return sizes.tokens * model.hidden * element + own
    return sizes.tokens * model.hidden * element * 2 + _norm(model, sizes.tokens, element)


def _loss(model: Model, sizes: ActivationSizes) -> Any:
    """Return the bytes that the loss keeps: probabilities and a scalar, or, if the vocabulary is cut, ids and masks."""
    logits = head_kept(model, sizes)["logits"]
    if model.images is not None:
        return logits + FP32
    return logits + np.where(np.asarray(sizes.tp) > 1, sizes.tokens * (INDEX_BYTES + 2), FP32)
