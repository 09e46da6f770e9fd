"""Operators of one block: matrix products, attention, and memory passes, with their sizes on one GPU.

    x ─ norm ─ qkv ─ attention ─ projection ─ add ─ norm ─ up ─ activation ─ down ─ add ─▶
        pass   product  kernel     product    pass  pass  product   pass    product  pass

A size is a number or an array with one entry per configuration: one list of operators describes all of them. Speeds are
in `operator_device_times` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.descriptions.model import CHUNK, LayerKind, Model

Array: TypeAlias = NDArray[np.float64]
UP = "mla_up_proj"
MODULE_OF = {"expert": "moe_act", "shared": "mlp_act", "ffn": "mlp_act"}
"""Modules of activations, by the name of their network."""
FP32 = 4.0
"""Bytes of an element where an operator works in single precision, whatever the model's precision."""


@dataclass(frozen=True, eq=False)
class BlockSizes:
    """Sizes that determine the time of a block, for each of n configurations; all arrays of length n."""

    tp: Array
    cp: Array
    ep: Array
    sequence_parallel: Array
    """1 with sequence parallelism, else 0."""
    microbatch: Array
    seq: Array
    width: Array
    """Bytes of an element of an activation or a weight."""
    accumulated: Array | float = 0.0
    """Bytes that a product reads and writes for each element of a weight's gradient, if it adds to earlier ones itself;
    else 0."""
    rerun: Mapping[str, Array | float] = field(default_factory=lambda: {"core_attn": 1.0})
    """1 for each of `descriptions.strategy.MODULES` that is recomputed, else 0."""
    tp_overlap: Array | float = 1.0
    """1 if reductions of gradients over tp run beside products, else 0."""
    ep_overlap: Array | float = 0.0
    """1 if tokens go to experts beside another microbatch's computation, for which the host launches meanwhile."""
    fused_loss: Array | float = 0.0
    """1 if the cross-entropy is one kernel, in place of the logits; else 0."""

    @property
    def tokens(self) -> Array:
        """Tokens of a microbatch on one rank of the cp axis."""
        return self.microbatch * self.seq / self.cp

    @property
    def between(self) -> Array:
        """Tokens of a rank between the tensor-parallel regions: sequence parallelism divides them over tp."""
        return self.tokens / np.where(self.sequence_parallel > 0, self.tp, 1.0)


@dataclass(frozen=True, eq=False)
class Product:
    """`batch` products of an m × k by a k × n matrix; the backward has two of the same size."""

    name: str
    m: Array
    n: Array
    k: Array
    width: Array
    batch: Array | float = 1.0
    weighted: bool = True
    """Whether one factor is a weight: one product of the backward is then the weight half."""
    module: str = ""
    """Module that it belongs to, by the names of `descriptions.strategy.MODULES`."""
    column: bool = False
    """Whether tp cuts its columns: the gradient of its input is then all-reduced over tp."""


@dataclass(frozen=True, eq=False)
class AttentionKernel:
    """Fused attention kernel, which never materialises the scores."""

    name: str
    flops: Array
    """FLOP of the forward, without those that a causal mask skips."""
    head: int
    """Size of a head."""
    length: Array
    """Average number of keys per query in one call: the cp ring brings a part at a time."""
    kernel: str
    """Kernel, by the names of `Model.attention`."""
    batch: Array
    """Samples x heads."""
    rows: Array
    """Queries of a sample on this rank."""
    ring: Array
    """Ranks of the cp axis, around which the keys are passed."""
    module: str = "core_attn"


@dataclass(frozen=True, eq=False)
class MemoryOp:
    """Memory-bound operator: bytes read and written, forward and backward."""

    name: str
    forward: Array
    backward: Array
    module: str = ""


Operator: TypeAlias = Product | AttentionKernel | MemoryOp


def block(model: Model, sizes: BlockSizes, kind: LayerKind) -> tuple[Operator, ...]:
    """Return the operators of one layer of this kind."""
    feed_forward = (
        _mixture(model, sizes) if kind.experts else _feed_forward(model, sizes, model.ffn_width, sizes.tokens, "ffn")
    )
    mixer = (_delta_net if kind.delta else attention)(model, sizes)
    first, second = (_norm(name, sizes.between * model.hidden, sizes.width) for name in ("norm", "ffn norm"))
    if model.parallel_block:
        norms = (first, second)[: model.norms]
        return (*norms, *mixer, *feed_forward, _add("block add", model, sizes, 2))
    middle = _add("attention add", model, sizes)
    return (first, *mixer, middle, second, *feed_forward, _add("ffn add", model, sizes))


def attention(model: Model, sizes: BlockSizes) -> tuple[Operator, ...]:
    """Return the projections and the kernel of self-attention."""
    head = model.query_width
    heads = model.heads / sizes.tp
    key_heads = np.maximum((model.kv_heads or model.heads) / sizes.tp, 1.0)
    values = model.latent.value_size if model.latent else head
    tokens, width = sizes.tokens, sizes.width
    return (
        *_projections(model, sizes, heads, key_heads, head),
        _split(model, tokens * (heads + 2 * key_heads) * head, width),
        *_rotary(model, tokens, heads + key_heads, head, width),
        *_core(model, sizes, heads, head, values),
        *_gate(model, tokens * heads * values, width),
        Product("projection", tokens, np.full_like(tokens, model.hidden), heads * values, width),
        *_bias("projection", tokens * model.hidden, width, present=model.biases),
    )


def head(model: Model, sizes: BlockSizes) -> tuple[Operator, ...]:
    """Return the operators after the last block: the final norm, the logits and their cross-entropy."""
    tokens, width = sizes.tokens, sizes.width
    classes = model.images.classes if model.images else model.vocab
    rows = tokens / model.images.tokens if model.images else tokens
    vocab = classes / sizes.tp
    logits = rows * vocab
    return (
        _norm("final norm", sizes.between * model.hidden, width),
        Product("logits", rows, vocab, np.full_like(tokens, model.hidden), width, column=True),
        MemoryOp(
            "cross-entropy",
            logits * np.where(np.asarray(sizes.fused_loss) > 0, 3 * width, width + 5 * FP32),
            logits * np.where(np.asarray(sizes.fused_loss) > 0, 2 * width, width + 3 * FP32),
        ),
    )


def embedding(model: Model, sizes: BlockSizes) -> tuple[Operator, ...]:
    """Return the operators before the first block: token lookup, or patch projection."""
    tokens, width = sizes.tokens, sizes.width
    elements = tokens * model.hidden
    if model.images:
        patch = float(model.images.patch**2 * model.images.channels)
        return (Product("patches", tokens, np.full_like(tokens, model.hidden), np.full_like(tokens, patch), width),)
    return (MemoryOp("embedding", 3 * elements * width, 3 * elements * width),)


def _projections(model: Model, sizes: BlockSizes, heads: Array, key_heads: Array, head: int) -> tuple[Operator, ...]:
    tokens, width = sizes.tokens, sizes.width
    hidden = np.full_like(tokens, model.hidden)
    if model.latent is None:
        queries = heads * (1 + model.attention_gate)
        return (Product("qkv", tokens, (queries + 2 * key_heads) * head, hidden, width, column=True),)
    latent = model.latent
    rank = np.full_like(tokens, latent.kv_rank)
    narrow = np.full_like(tokens, latent.kv_rank + latent.rope_size)
    unroped = head - latent.rope_size
    expand = Product("kv up", tokens, heads * (unroped + latent.value_size), rank, width, module=UP, column=True)
    compress = Product("kv down", tokens, narrow, hidden, width)
    if not latent.q_rank:
        return (Product("q", tokens, heads * head, hidden, width, column=True), compress, expand)
    queries = np.full_like(tokens, latent.q_rank)
    return (
        Product("q down", tokens, queries, hidden, width),
        Product("q up", tokens, heads * head, queries, width, module=UP, column=True),
        compress,
        expand,
    )


def _gate(model: Model, elements: Array, width: Array) -> tuple[Operator, ...]:
    """Return the pass that multiplies the output of attention by its gate, if there is one."""
    return (MemoryOp("gate", 3 * elements * width, 5 * elements * width),) if model.attention_gate else ()


def _delta_net(model: Model, sizes: BlockSizes) -> tuple[Operator, ...]:
    """Return the operators of a gated delta net, in chunks of tokens (arXiv:2406.06484, section 3; arXiv:2412.06464).

    Within a chunk, keys and queries meet keys, and the inverse of the former multiplies keys and values. From chunk to
    chunk, a state of key_size × value_size per head meets keys, is updated, and meets queries; the first two one chunk
    after the other. What the backward runs again is not counted.
    """
    delta, tokens, width = model.delta, sizes.tokens, sizes.width
    assert delta is not None
    hidden, wide = np.full_like(tokens, model.hidden), delta.value_heads * delta.value_size / sizes.tp
    heads, key, value, chunk = (
        np.full_like(tokens, size) for size in (delta.value_heads, delta.key_size, delta.value_size, CHUNK)
    )
    heads = heads / sizes.tp
    chunks, convolved = heads * tokens / CHUNK, tokens * delta.convolved / sizes.tp
    spread = tokens * 2 * heads * key  # queries and keys, repeated for each head of values, with a norm
    rule = (
        ("meet", chunk, 2 * chunk, key, chunks),
        ("inverse", chunk, key + value, chunk, chunks),
        ("state", key, value, 2 * sizes.seq, heads * sizes.microbatch),
        ("query", chunk, value, key, chunks),
        ("values", chunk, value, chunk, chunks),
    )
    return (
        Product("delta qkvz", tokens, delta.convolved / sizes.tp + wide + 2 * heads, hidden, width, column=True),
        MemoryOp("convolution", 2 * convolved * width, 4 * convolved * width),
        _norm("delta qk norm", spread, width),
        *(Product(f"delta {name}", m, n, k, width, batch, weighted=False) for name, m, n, k, batch in rule),
        MemoryOp("delta norm", 3 * tokens * wide * width, 5 * tokens * wide * width),
        Product("delta projection", tokens, hidden, wide, width),
    )


def _rotary(model: Model, tokens: Array, heads: Array, head: int, width: Array) -> tuple[Operator, ...]:
    touched = tokens * heads * head * width * 2
    rotary = (MemoryOp("rotary", touched, touched),) if model.positions == "rope" else ()
    norms = (_norm("qk norm", tokens * heads * head, width),) if model.qk_norm else ()
    return (*norms, *rotary)


def _core(model: Model, sizes: BlockSizes, heads: Array, head: int, values: int) -> tuple[Operator, ...]:
    """Return the core of attention: fused, or scores, softmax with mask, dropout, and values as separate operators."""
    rows, columns, width = sizes.seq / sizes.cp, sizes.seq, sizes.width
    batch = sizes.microbatch * heads
    scores = batch * rows * columns
    if model.attention != "unfused":
        keys = columns * (0.5 if model.causal else 1.0)
        if model.window is not None:  # of the layers together
            whole = 1 / model.window_except if model.window_except else 0.0
            keys = whole * keys + (1 - whole) * np.minimum(model.window, keys)
        flops, length = 2 * batch * rows * keys * (head + values), keys / sizes.cp
        return (AttentionKernel("attention", flops, head, length, model.attention, batch, rows, sizes.cp),)
    depth, value = np.full_like(rows, head), np.full_like(rows, values)
    passes = MemoryOp("softmax", scores * 2 * width, scores * 3 * width, module="core_attn")
    dropped = scores * (2 * width + 1)
    dropout = (MemoryOp("attention dropout", dropped, dropped, module="core_attn"),) if model.dropout else ()
    return (
        Product("scores", rows, columns, depth, width, batch, weighted=False, module="core_attn"),
        passes,
        *dropout,
        Product("values", rows, value, columns, width, batch, weighted=False, module="core_attn"),
    )


def _feed_forward(
    model: Model, sizes: BlockSizes, ffn: float, tokens: Array, name: str, groups: Array | float = 1.0
) -> tuple[Operator, ...]:
    """Return the operators of a network; of `groups` alike, each with so many tokens, in one kernel."""
    hidden = np.full_like(tokens, model.hidden)
    wide = np.full_like(tokens, ffn) / sizes.tp
    inputs = 2 if model.is_gated else 1
    touched = tokens * wide * sizes.width
    return (
        Product(f"{name} up", tokens, inputs * wide, hidden, sizes.width, groups, column=True),
        MemoryOp(
            f"{name} activation",
            (inputs + 1) * touched * groups,
            (2 * inputs + 1) * touched * groups,
            MODULE_OF.get(name, ""),
        ),
        Product(f"{name} down", tokens, hidden, wide, sizes.width, groups),
        *_bias(name, tokens * (inputs * wide + model.hidden) * groups, sizes.width, present=model.biases),
    )


def _mixture(model: Model, sizes: BlockSizes) -> tuple[Operator, ...]:
    """Return router, permutation, grouped experts of this rank, and the way back; at even loads.

    Rows are sorted by rank before the exchange over ep, and by expert after it.
    """
    if model.experts is None:
        raise ValueError("a model without experts has no mixture")
    experts, tokens = model.experts, sizes.tokens
    resident = experts.count / sizes.ep
    routed = tokens * experts.rows
    hidden = np.full_like(tokens, model.hidden)
    moved = routed * model.hidden * sizes.width * 2 * np.where((sizes.ep > 1) & (resident > 1), 2.0, 1.0)
    shared = (
        _feed_forward(model, sizes, float(experts.ffn * experts.shared), tokens, "shared") if experts.shared else ()
    )
    return (
        Product(
            "router",
            tokens,
            np.full_like(tokens, experts.count + experts.shared_gate),
            hidden,
            np.full_like(tokens, FP32),
        ),
        MemoryOp("permute", moved, moved),
        *_feed_forward(model, sizes, float(experts.ffn), routed / resident, "expert", resident),
        MemoryOp("unpermute", moved, moved),
        *shared,
    )


def _norm(name: str, elements: Array, width: Array) -> MemoryOp:
    """Return a norm; its backward reads input and gradient twice, for the input's and for the weights' gradient."""
    return MemoryOp(name, 2 * elements * width, 5 * elements * width, "layernorm")


def _split(model: Model, elements: Array, width: Array) -> MemoryOp:
    """Return the split of one product into queries, keys and values (views); its backward joins their gradients."""
    return MemoryOp("split", np.zeros_like(elements), elements * width * (3 if model.biases_of_queries else 2))


def _bias(name: str, elements: Array, width: Array, *, present: bool) -> tuple[MemoryOp, ...]:
    """Return the cost of a bias: free in the product's kernel; its backward sums the gradient over tokens."""
    return (MemoryOp(f"{name} bias", np.zeros_like(elements), elements * width),) if present else ()


def _add(name: str, model: Model, sizes: BlockSizes, branches: int = 1) -> MemoryOp:
    """Return bias, dropout and residual in one kernel; its backward also adds the gradients of branches and input."""
    elements = sizes.between * model.hidden
    mask = branches if model.dropout else 0.0
    masked = branches * (2 * sizes.width + 1) if model.dropout else 0.0
    added = 2 + (model.norms if branches > 1 else 1)
    return MemoryOp(name, elements * ((2 + branches) * sizes.width + mask), elements * (masked + added * sizes.width))
