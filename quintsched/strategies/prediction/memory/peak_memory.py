"""Peak memory of a pipeline rank, term by term.

    weights │ gradients │ optimizer │ gathered │ activations in flight │ logits │ buffers │ temporary │ fragmentation
    └──────────── `state`, exact ────────────┘ └ `activations` x `in_flight` ┘            └── one block's backward

All sizes are arrays that broadcast against each other: strategies in rows and, if requested, kinds of ranks in columns.
Activations in flight peak after the last forward of the warm-up, when all state is resident; so the terms add up to the
peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.parameters import (
    Held,
    block_weights,
    embedding_weights,
    head_weights,
    on_rank,
)
from quintsched.strategies.descriptions.strategy import MODULES
from quintsched.strategies.prediction.memory.activations import (
    FP32,
    ActivationSizes,
    block_input,
    block_kept,
    block_rerun,
    embedding_kept,
    head_kept,
)
from quintsched.strategies.prediction.memory.state import Precision, state_bytes

FRAGMENTATION = 0.03
"""Fraction of temporary memory that an allocator reserves and cannot use. An assumption, not fitted."""

COMES_AND_GOES = ("gathered", "buffers", "temporary", "fragmentation")
"""Temporary terms: neither weights, gradients, optimizer state nor activations."""

MESSAGE_BUFFERS = 4
"""Number of message buffers between stages on a rank: two each for activations and for gradients."""


@dataclass(frozen=True, eq=False)
class RankLayers:
    """Layers of ranks, as counts, with those recomputed; a mixture layer has `descriptions.model.Experts`."""

    dense: Any
    mixture: Any
    full_dense: Any
    """Number of the dense layers that are fully recomputed."""
    full_mixture: Any
    first: Any
    """1 with the embedding, else 0."""
    last: Any
    """1 with the head, else 0."""
    in_flight: Any
    """Peak number of microbatches in flight; see the module `in_flight`."""
    first_in_flight: Any
    """Peak number of microbatches of the first stage."""
    logits_in_flight: Any
    """Number of microbatches whose logits the last stage holds."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Settings of the parallel layout that determine memory; `ActivationSizes` has tp and cp."""

    pp: Any
    dp: Any
    ep: Any
    zero: Any
    chunks: Any
    rerun: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(MODULES, 0))
    """1 for each module that is recomputed, else 0."""
    pending: Any = 0
    """With ZeRO-2 and 3, fraction of the gradients that is accumulated beside the shards, until it is reduced."""
    gradient: Any = None
    """Bytes of an element of a gradient; None: 4 at least."""
    fused_accumulation: Any = 0
    """1 if products add weights' gradients to earlier ones themselves, else 0."""
    adds_later: Any = 0
    """1 if the gradients of a microbatch are all there before they are added to the sum, else 0."""
    fused_loss: Any = 0
    """1 if the loss is computed from logits in the model's precision, and their gradient in place, else 0."""


def memory_terms(model: Model, sizes: ActivationSizes, mesh: Mesh, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes of each term; they add up to a rank's peak, without the hardware's reserve."""
    state = _state(model, sizes, mesh, ranks)
    kept = _activations(model, sizes, mesh, ranks)
    input_bytes = block_input(model, sizes)
    buffers = np.where(np.asarray(mesh.pp) > 1, MESSAGE_BUFFERS * input_bytes, 0.0)
    temporary = _temporary(model, sizes, mesh, ranks) + np.asarray(mesh.adds_later) * state["weights"]
    moving = sum(kept.values()) + buffers + temporary + state["gathered"]
    return state | kept | {"buffers": buffers, "temporary": temporary, "fragmentation": FRAGMENTATION * moving}


def _state(model: Model, sizes: ActivationSizes, mesh: Mesh, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes of weights, gradients and optimizer state.

    A tied head is a second copy, unless its stage also has the embedding.
    """
    tp, first = sizes.tp, embedding_weights(model, sizes.seq)
    plain = on_rank(block_weights(model, has_experts=False), tp=tp)
    mixture = on_rank(block_weights(model, has_experts=True), tp=tp, ep=mesh.ep) if model.experts else Held(0, 0)
    before, behind = on_rank(first, tp=tp).dense, on_rank(head_weights(model), tp=tp).dense
    joined = on_rank(first[:1], tp=tp).dense * (np.asarray(mesh.pp) * mesh.chunks == 1) if model.tied else 0.0
    dense = ranks.dense * plain.dense + ranks.first * before + ranks.last * (behind - joined)
    unit = np.maximum(plain.dense * (np.asarray(ranks.dense) > 0), before * ranks.first)
    held, units = Held(dense, 0.0), Held(unit, 0.0)
    if model.experts:
        held = Held(dense + ranks.mixture * mixture.dense, ranks.mixture * mixture.experts)
        has_mixture = np.asarray(ranks.mixture) > 0
        units = Held(np.maximum(unit, mixture.dense * has_mixture), mixture.experts * has_mixture)
    outer = mesh.dp * sizes.cp
    precision = Precision.from_element(sizes.element, gradient=mesh.gradient)
    return state_bytes(
        held,
        units,
        precision,
        zero=mesh.zero,
        replicas=outer * mesh.ep,
        expert_replicas=outer,
        pending=mesh.pending,
    )


def _activations(model: Model, sizes: ActivationSizes, mesh: Mesh, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes of activations in flight, by kind."""
    kept = _kept(model, sizes, mesh, ranks)
    found = {f"activations_{kind}": bytes_ * ranks.in_flight for kind, bytes_ in kept.items()}
    found["activations_embedding"] = ranks.first * ranks.first_in_flight * embedding_kept(model, sizes)
    behind, logits = head_kept(model, sizes, fused=mesh.fused_loss), ranks.logits_in_flight
    found["activations_tokens"] = found["activations_tokens"] + ranks.last * logits * behind["tokens"]
    return found | {"logits": ranks.last * logits * behind["logits"]}


def _kept(model: Model, sizes: ActivationSizes, mesh: Mesh, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes that the layers of a rank keep of one microbatch."""
    full = ranks.full_dense + ranks.full_mixture
    found = {"inputs": full * block_input(model, sizes)}
    layers = [(False, ranks.dense - ranks.full_dense)]
    if model.experts is not None:
        layers.append((True, ranks.mixture - ranks.full_mixture))
    for has_experts, count in layers:
        dropped = block_rerun(model, sizes, mesh.rerun, has_experts=has_experts)
        for kind, bytes_ in block_kept(model, sizes, has_experts=has_experts).items():
            found[kind] = found.get(kind, 0) + count * (bytes_ - dropped.get(kind, 0))
    return found


def _temporary(model: Model, sizes: ActivationSizes, mesh: Mesh, ranks: RankLayers) -> Any:
    """Return the temporary bytes of a backward: recomputed activations, and gradients of the widest activations.

    For one block at a time, or for logits, whose gradient is made in place and then, unless the loss is fused, rounded
    to the model's precision. Besides, the gradient of one weight in the model's precision, before it is added to the
    others; where the product adds it, Transformer Engine keeps an unused buffer for each shape of weight instead.
    """
    found: Any = 0.0
    for has_experts, count, full in ((False, ranks.dense, ranks.full_dense), (True, ranks.mixture, ranks.full_mixture)):
        if has_experts and model.experts is None:
            continue
        kept = block_kept(model, sizes, has_experts=has_experts)
        dropped = block_rerun(model, sizes, mesh.rerun, has_experts=has_experts)
        again = np.where(np.asarray(full) > 0, sum(kept.values()), sum(dropped.values()))
        scores = kept["scores"] if model.attention == "unfused" else 0.0
        wide = np.maximum(kept["experts" if has_experts else "ffn"], scores) / 2 + block_input(model, sizes)
        found = np.maximum(found, np.where(np.asarray(count) > 0, again + wide, 0.0))
    logits = head_kept(model, sizes)["logits"] * (np.asarray(mesh.fused_loss) == 0)
    found = np.maximum(found, ranks.last * logits * (np.asarray(sizes.element) / FP32))
    in_units = (np.asarray(mesh.zero) >= 2) & (np.asarray(mesh.pending) == 0)  # those are in `gathered`
    return found + np.where(in_units, 0.0, sizes.element * _weight_gradients(model, sizes, mesh, ranks))


def _weight_gradients(model: Model, sizes: ActivationSizes, mesh: Mesh, ranks: RankLayers) -> Any:
    """Return the elements of gradients of weights that are held while a block's backward, or the head's, runs."""
    fused = np.asarray(mesh.fused_accumulation) > 0
    head = ranks.last * on_rank(head_weights(model)[-1:], tp=sizes.tp).dense
    found: Any = 0.0
    for has_experts, count in ((False, ranks.dense), (True, ranks.mixture)):
        if has_experts and model.experts is None:
            continue
        matrices = [w for w in block_weights(model, has_experts=has_experts) if w.kind != "norms"]
        sizes_of = [on_rank([replace(weight, copies=1)], tp=sizes.tp).dense for weight in matrices]
        each = np.where(fused, sum(sizes_of), reduce(np.maximum, sizes_of))
        found = np.maximum(found, np.where(np.asarray(count) > 0, each, 0.0))
    return np.where(fused, found + head, np.maximum(found, head))
