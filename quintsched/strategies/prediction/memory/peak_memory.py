"""Peak memory of a pipeline rank, term by term.

    weights │ gradients │ optimizer │ gathered │ activations in flight │ logits │ buffers │ temporary │ fragmentation
    └──────────── `weights_grads_optimizer_bytes` ─┘ └ `activations` x `in_flight` ┘            └── one block's backward

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
from numpy.typing import NDArray

from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.parameters import Held, block_weights, embedding_weights, head_weights, on_rank
from quintsched.strategies.descriptions.strategy import MODULES
from quintsched.strategies.prediction.layers_of_ranks import RankKind
from quintsched.strategies.prediction.memory.activations import (
    FP32,
    ActivationSizes,
    block_input,
    block_kept,
    block_rerun,
    delta_states,
    embedding_kept,
    head_kept,
)
from quintsched.strategies.prediction.memory.weights_grads_optimizer_bytes import state_bytes

FRAGMENTATION = 0.03
"""Fraction of temporary memory that an allocator reserves and cannot use. An assumption, not fitted."""

COMES_AND_GOES = ("gathered", "buffers", "temporary", "fragmentation")
"""Temporary terms: neither weights, gradients, optimizer state nor activations."""

MESSAGE_BUFFERS = 4
"""Number of message buffers between stages on a rank: two each for activations and for gradients."""


@dataclass(frozen=True, eq=False)
class RankLayers(RankKind):
    """Layers of ranks, and the microbatches of which they hold activations."""

    in_flight: Any
    """Peak number of microbatches in flight; see `in_flight_formulas`. Of stages that hold different layers, such
    that the activations of all layers of the rank, times it, are those that it holds at its fullest moment."""
    stages_in_flight: Any
    """Peak number of microbatches in flight if all stages of a rank count alike."""
    first_in_flight: Any
    """Peak number of microbatches of the first stage."""
    logits_in_flight: Any
    """Number of microbatches whose logits the last stage holds."""


@dataclass(frozen=True, eq=False)
class Sharding:
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


def memory_terms(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes of each term; they add up to a rank's peak, without the hardware's reserve."""
    state = _state(model, sizes, mesh, ranks)
    kept = _activations(model, sizes, mesh, ranks)
    input_bytes = block_input(model, sizes)
    buffers = np.where(np.asarray(mesh.pp) > 1, MESSAGE_BUFFERS * input_bytes, 0.0)
    temporary = _temporary(model, sizes, mesh, ranks) + np.asarray(mesh.adds_later) * state["weights"]
    moving = sum(kept.values()) + buffers + temporary + state["gathered"]
    return state | kept | {"buffers": buffers, "temporary": temporary, "fragmentation": FRAGMENTATION * moving}


def _state(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes of weights, gradients and optimizer state.

    A tied head is a second copy, unless its stage also has the embedding.
    """
    tp, first = sizes.tp, embedding_weights(model, sizes.seq)
    each = [on_rank(block_weights(model, kind), tp=tp, ep=mesh.ep) for kind in model.kinds]
    counts = ranks.dense, ranks.mixture
    before, behind = on_rank(first, tp=tp).dense, on_rank(head_weights(model), tp=tp).dense
    joined = on_rank(first[:1], tp=tp).dense * (np.asarray(mesh.pp) * mesh.chunks == 1) if model.tied else 0.0
    held, units = Held(ranks.first * before + ranks.last * (behind - joined), 0.0), Held(before * ranks.first, 0.0)
    for one, count in zip(each, counts, strict=False):
        held = Held(held.dense + count * one.dense, held.experts + count * one.experts)
        has = np.asarray(count) > 0
        units = Held(np.maximum(units.dense, one.dense * has), np.maximum(units.experts, one.experts * has))
    outer = mesh.dp * sizes.cp
    return state_bytes(
        held,
        units,
        sizes.element,
        zero=mesh.zero,
        replicas=outer * mesh.ep,
        expert_replicas=outer,
        gradient=mesh.gradient,
        pending=mesh.pending,
    )


def _activations(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes of activations in flight, by kind."""
    kept = _kept(model, sizes, mesh, ranks)
    found = {f"activations_{kind}": bytes_ * ranks.in_flight for kind, bytes_ in kept.items()}
    found["activations_embedding"] = ranks.first * ranks.first_in_flight * embedding_kept(model, sizes)
    behind, logits = head_kept(model, sizes, fused=mesh.fused_loss), ranks.logits_in_flight
    found["activations_tokens"] = found["activations_tokens"] + ranks.last * logits * behind["tokens"]
    return found | {"logits": ranks.last * logits * behind["logits"]}


def _kept(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> dict[str, Any]:
    """Return the bytes that the layers of a rank keep of one microbatch."""
    full = ranks.full_dense + ranks.full_mixture
    found = {"inputs": full * block_input(model, sizes)}
    layers = ranks.dense - ranks.full_dense, ranks.mixture - ranks.full_mixture
    for kind, count in zip(model.kinds, layers, strict=False):
        dropped = block_rerun(model, sizes, mesh.rerun, kind)
        for term, bytes_ in block_kept(model, sizes, kind).items():
            found[term] = found.get(term, 0) + count * (bytes_ - dropped.get(term, 0))
    return found


def layer_bytes(model: Model, sizes: ActivationSizes, mesh: Sharding) -> NDArray[np.float64]:
    """Return the bytes that a layer keeps of one microbatch, (n, 4): of each kind, and of each if it is recomputed."""
    full = block_input(model, sizes)
    each = []
    for kind in model.kinds:
        dropped = sum(block_rerun(model, sizes, mesh.rerun, kind).values())
        each.append(sum(block_kept(model, sizes, kind).values()) - dropped)
    return np.concatenate(np.broadcast_arrays(each[0], each[-1], full, full), axis=1)


def _temporary(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> Any:
    """Return the temporary bytes of a backward: recomputed activations, and gradients of the widest activations.

    For one block at a time, or for logits, whose gradient is made in place and then, unless the loss is fused, rounded
    to the model's precision. Besides, the gradient of one weight in the model's precision, before it is added to the
    others; where the product adds it, Transformer Engine keeps an unused buffer for each shape of weight instead.
    """
    found: Any = 0.0
    layers = (ranks.dense, ranks.full_dense), (ranks.mixture, ranks.full_mixture)
    for kind, (count, full) in zip(model.kinds, layers, strict=False):
        kept = block_kept(model, sizes, kind)
        dropped = block_rerun(model, sizes, mesh.rerun, kind)
        again = np.where(np.asarray(full) > 0, sum(kept.values()), sum(dropped.values()))
        scores = kept["scores"] if model.attention == "unfused" else 0.0
        wide = np.maximum(kept["experts" if kind.experts else "ffn"], scores) / 2 + block_input(model, sizes)
        wide = wide + (delta_states(model, sizes) if kind.delta else 0.0)
        found = np.maximum(found, np.where(np.asarray(count) > 0, again + wide, 0.0))
    logits = head_kept(model, sizes)["logits"] * (np.asarray(mesh.fused_loss) == 0)
    found = np.maximum(found, ranks.last * logits * (np.asarray(sizes.element) / FP32))
    in_units = (np.asarray(mesh.zero) >= 2) & (np.asarray(mesh.pending) == 0)  # those are in `gathered`
    return found + np.where(in_units, 0.0, sizes.element * _weight_gradients(model, sizes, mesh, ranks))


def _weight_gradients(model: Model, sizes: ActivationSizes, mesh: Sharding, ranks: RankLayers) -> Any:
    """Return the elements of gradients of weights that are held while a block's backward, or the head's, runs."""
    fused = np.asarray(mesh.fused_accumulation) > 0
    head = ranks.last * on_rank(head_weights(model)[-1:], tp=sizes.tp).dense
    found: Any = 0.0
    for kind, count in zip(model.kinds, (ranks.dense, ranks.mixture), strict=False):
        matrices = [w for w in block_weights(model, kind) if w.kind != "norms"]
        sizes_of = [on_rank([replace(weight, copies=1)], tp=sizes.tp).dense for weight in matrices]
        each = np.where(fused, sum(sizes_of), reduce(np.maximum, sizes_of))
        found = np.maximum(found, np.where(np.asarray(count) > 0, each, 0.0))
    return np.where(fused, found + head, np.maximum(found, head))
