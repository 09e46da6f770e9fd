"""Exact parameter counts of a model, in total and per rank, by kind.

    embedding │ block 0 │ block 1 │ …  │ head        a block is a list of weights; a tp rank holds of them
       │                                 │              in full    norms, the router, biases after a sum over tp
       └────────── one, if tied ─────────┘              a part     of heads, of the feed-forward width, of tokens

Where a size does not divide, the largest part counts: the vocabulary is padded, and key-value heads fewer than the tp
ranks are replicated. Experts are sharded over tp and over ep. All functions take numbers or arrays with one entry per
strategy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from quintsched.strategies.descriptions.model import LayerKind, Model

IntOrArray: TypeAlias = Any
"""Integer, or an array of them."""

PARAMETER_KINDS = ("embedding", "positions", "attention", "ffn", "router", "experts", "norms", "biases", "head")


@dataclass(frozen=True)
class Weight:
    """One weight: `units` rows that tp can cut between, of `each` elements."""

    name: str
    kind: str
    units: IntOrArray
    each: int
    is_cut: bool = False
    """Whether tp shards it."""
    copies: int = 1
    """Number of experts that have one each."""

    @property
    def numbers(self) -> Any:
        """Elements of all copies, unsharded."""
        return self.units * self.each * self.copies

    def on_rank(self, tp: IntOrArray) -> Any:
        """Elements of one copy on the tp rank that holds most."""
        return -(-self.units // tp) * self.each if self.is_cut else self.units * self.each


class Held(NamedTuple):
    """Parameters on one rank; gradients of `dense` are summed over dp, cp and ep, those of `experts` not over ep."""

    dense: Any
    experts: Any


@cache
def block_weights(model: Model, kind: LayerKind) -> tuple[Weight, ...]:
    """Return the weights of one block of this kind."""
    mixer = _delta_net if kind.delta else _latent_attention if model.latent else _attention
    return (
        *_norm(model, "norm1"),
        *mixer(model),
        *(_norm(model, "norm2") if model.norms > 1 else ()),
        *(_experts(model) if kind.experts else _feed_forward(model, "mlp", model.ffn_width, biases=model.biases)),
    )


def embedding_weights(model: Model, seq: IntOrArray | None = None) -> tuple[Weight, ...]:
    """Return the weights before the first block, for sequences of `seq` tokens (None: the model's)."""
    hidden = model.hidden
    if model.images is not None:
        pixels = model.images.channels * model.images.patch**2
        return (
            Weight("class_token", "positions", 1, hidden),
            Weight("positions", "positions", model.images.tokens, hidden),
            Weight("proj.weight", "embedding", pixels, hidden),
            *_bias("proj.bias", hidden, has=model.biases),
        )
    found = [Weight("tokens.weight", "embedding", model.vocab, hidden, is_cut=True)]
    if model.positions == "learned":
        rows = model.seq if seq is None else np.maximum(model.seq, seq)
        found.append(Weight("positions.weight", "positions", rows + model.extra_positions, hidden))
    return (*found, *(_norm(model, "norm") if model.embedding_norm else ()))


def head_weights(model: Model) -> tuple[Weight, ...]:
    """Return the weights after the last block, including a tied head."""
    if model.images is not None:
        classes = model.images.classes
        head = (Weight("head.weight", "head", classes, model.hidden), *_bias("head.bias", classes, has=model.biases))
        return (*_norm(model, "norm"), *head)
    return (*_norm(model, "norm"), Weight("head.weight", "head", model.vocab, model.hidden, is_cut=True))


def count(model: Model, seq: int | None = None) -> dict[str, int]:
    """Return the number of parameters by kind (`PARAMETER_KINDS`); a tied head counts as the embedding."""
    found = dict.fromkeys(PARAMETER_KINDS, 0)
    for place, kind in enumerate(model.kinds):
        layers = model.layer_kinds.count(place)
        _add(found, block_weights(model, kind) if layers else (), layers)
    _add(found, embedding_weights(model, seq), 1)
    _add(found, head_weights(model), 1)
    if model.tied:
        found["head"] = 0
    return found


def total(model: Model, seq: int | None = None) -> int:
    """Return the number of parameters."""
    return sum(count(model, seq).values())


def active(model: Model, seq: int | None = None) -> int:
    """Return the number of active parameters per token: of the experts, those it is routed to."""
    if model.experts is None:
        return total(model, seq)
    one = sum(int(weight.numbers) for weight in _feed_forward(model, "", model.experts.ffn, biases=False))
    one_of_each_layer = model.has_experts.count(True) * one
    return total(model, seq) - one_of_each_layer * (model.experts.count - model.experts.top_k)


def on_rank(weights: Iterable[Weight], *, tp: IntOrArray, ep: IntOrArray = 1) -> Held:
    """Return the number of parameters of some weights on a rank; experts are divided over `ep`."""
    dense: Any = 0
    per_unit: dict[tuple[int, int], int] = {}
    for weight in weights:
        if weight.is_cut:
            alike = weight.units, weight.copies
            per_unit[alike] = per_unit.get(alike, 0) + weight.each
        else:
            dense = dense + weight.numbers
    experts: Any = 0
    for (units, copies), each in per_unit.items():
        here = -(-units // tp) * each
        dense, experts = (dense + here, experts) if copies == 1 else (dense, experts + here * (copies // ep))
    return Held(dense, experts)


def _add(found: dict[str, int], weights: Iterable[Weight], times: int) -> None:
    for weight in weights:
        found[weight.kind] += times * weight.numbers


def _delta_net(model: Model) -> tuple[Weight, ...]:
    """Return the weights of a gated delta net; its convolution has a row for each channel."""
    delta, hidden = model.delta, model.hidden
    assert delta is not None
    keys, values = delta.key_heads, delta.value_heads
    of_key = 2 * delta.key_size + 2 * values // keys * delta.value_size
    convolved = delta.convolved // keys * delta.convolution
    return (
        *_linear("delta.qkvz_proj", "attention", keys, of_key, hidden, biases=False),
        *_linear("delta.ba_proj", "attention", keys, 2 * values // keys, hidden, biases=False),
        Weight("delta.conv.weight", "biases", keys, convolved, is_cut=True),
        Weight("delta.decay", "biases", keys, 2 * values // keys, is_cut=True),
        Weight("delta.norm", "norms", 1, delta.value_size),
        Weight("delta.proj.weight", "attention", keys, values // keys * delta.value_size * hidden, is_cut=True),
    )


def _attention(model: Model) -> tuple[Weight, ...]:
    hidden, width, heads, kv_heads = model.hidden, model.head_width, model.heads, model.num_kv_heads
    has_biases = model.biases_of_queries
    of_query = width * (1 + model.attention_gate)
    if kv_heads == heads and not model.attention_gate:
        projections = _linear("attention.qkv", "attention", heads, 3 * width, hidden, biases=has_biases)
    else:
        projections = (
            *_linear("attention.q_proj", "attention", heads, of_query, hidden, biases=has_biases),
            *_linear("attention.k_proj", "attention", kv_heads, width, hidden, biases=has_biases),
            *_linear("attention.v_proj", "attention", kv_heads, width, hidden, biases=has_biases),
        )
    norms = (Weight("attention.q_norm", "norms", 1, width), Weight("attention.k_norm", "norms", 1, width))
    return (
        *projections,
        Weight("attention.proj.weight", "attention", heads, width * hidden, is_cut=True),
        *_bias("attention.proj.bias", hidden, has=model.biases),
        *((Weight("attention.sinks", "attention", heads, 1, is_cut=True),) if model.sinks else ()),
        *(norms if model.qk_norm else ()),
    )


def _latent_attention(model: Model) -> tuple[Weight, ...]:
    """Return the weights of latent attention; the down-projections are replicated over tp (DeepSeek-V2)."""
    latent, hidden, heads = model.latent, model.hidden, model.heads
    assert latent is not None
    queries: tuple[Weight, ...]
    if latent.q_rank:
        queries = (
            Weight("attention.q_down.weight", "attention", latent.q_rank, hidden),
            Weight("attention.q_norm", "norms", 1, latent.q_rank),
            Weight("attention.q_up.weight", "attention", heads, model.query_width * latent.q_rank, is_cut=True),
        )
    else:
        queries = (Weight("attention.q_proj.weight", "attention", heads, model.query_width * hidden, is_cut=True),)
    both = model.head_width + latent.value_size
    return (
        *queries,
        Weight("attention.kv_down.weight", "attention", latent.kv_rank + latent.rope_size, hidden),
        Weight("attention.kv_norm", "norms", 1, latent.kv_rank),
        Weight("attention.kv_up.weight", "attention", heads, both * latent.kv_rank, is_cut=True),
        Weight("attention.proj.weight", "attention", heads, latent.value_size * hidden, is_cut=True),
    )


def _feed_forward(model: Model, name: str, width: int, *, biases: bool) -> tuple[Weight, ...]:
    first = "gate_up" if model.is_gated else "fc1"
    return (
        *_linear(f"{name}.{first}", "ffn", width, 1 + model.is_gated, model.hidden, biases=biases),
        Weight(f"{name}.fc2.weight", "ffn", width, model.hidden, is_cut=True),
        *_bias(f"{name}.fc2.bias", model.hidden, has=biases),
    )


def _experts(model: Model) -> tuple[Weight, ...]:
    experts = model.experts
    assert experts is not None
    one = _feed_forward(model, "mlp.experts", experts.ffn, biases=False)
    routed = (Weight(w.name, "experts", w.units, w.each, w.is_cut, experts.count) for w in one)
    shared = _feed_forward(model, "mlp.shared", experts.shared * experts.ffn, biases=False) if experts.shared else ()
    return (
        Weight("mlp.router.weight", "router", experts.count + experts.shared_gate, model.hidden),
        *routed,
        *(Weight(w.name, "experts", w.units, w.each, w.is_cut) for w in shared),
    )


def _linear(name: str, kind: str, units: int, per_unit: int, inputs: int, *, biases: bool) -> tuple[Weight, ...]:
    """Return the weight and the bias of a linear layer whose outputs tp cuts between units."""
    weight = Weight(f"{name}.weight", kind, units, per_unit * inputs, is_cut=True)
    return (weight, Weight(f"{name}.bias", "biases", units, per_unit, is_cut=True)) if biases else (weight,)


def _bias(name: str, size: int, *, has: bool) -> tuple[Weight, ...]:
    return (Weight(name, "biases", 1, size),) if has else ()


def _norm(model: Model, name: str) -> tuple[Weight, ...]:
    scale = Weight(f"{name}.weight", "norms", 1, model.hidden)
    if model.norm == "rmsnorm" or not model.norm_biases:
        return (scale,)
    return (scale, Weight(f"{name}.bias", "norms", 1, model.hidden))
