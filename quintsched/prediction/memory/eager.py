"""What PyTorch's eager operators on a CPU, and our tensor parallelism, keep beyond the formulas of `activations`.

    layernorm          mean and 1/deviation of each token      rmsnorm     also tokens normalised, in 32 bits at least
    fewer heads of keys             a copy of what attention gives         positions   where each token is
    a vocabulary that tp cuts       ids within this rank's part, and which are there
    sequence parallelism            embedding and head have all tokens, not this rank's slice

With it bytes are exact: `Engine.step_counting_saved` counts them. Fused kernels keep none of it, and the formulas are
those of the papers. Where tokens go among experts only data can tell, so their bytes are no formula.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quintsched.descriptions.model import Model
from quintsched.prediction.memory.activations import FP32, Sizes

INDEX = 8
"""Bytes of a position, or of an id."""


def eager_block(model: Model, sizes: Sizes) -> Any:
    """Return the bytes that a block with a plain network keeps beyond `activations.block_kept`."""
    found = 2 * _norm(model, sizes, sizes.between)
    if model.num_kv_heads != model.heads:
        found = found + sizes.tokens * sizes.element * model.heads * model.head_width / sizes.tp
    return found


def eager_embedding(model: Model, sizes: Sizes) -> Any:
    """Return the bytes that the embedding keeps beyond `activations.embedding_kept`."""
    places = INDEX * sizes.seq / sizes.cp if model.positions == "learned" else 0
    masks = (sizes.tokens - sizes.between) * model.hidden * model.dropout
    return places + masks + _ids(sizes)


def eager_head(model: Model, sizes: Sizes) -> Any:
    """Return the bytes that head and cross entropy keep beyond `activations.head_kept`: a number for the loss, too."""
    slices = (sizes.tokens - sizes.between) * sizes.element * model.hidden * 2
    is_whole = np.asarray(sizes.tp) == 1
    return slices + _norm(model, sizes, sizes.tokens) + np.where(is_whole, FP32, sizes.tokens) + _ids(sizes)


def _ids(sizes: Sizes) -> Any:
    """Return the bytes of ids within a part of the vocabulary, and of which tokens have theirs there."""
    return np.where(np.asarray(sizes.tp) == 1, 0, sizes.tokens * (INDEX + 1))


def _norm(model: Model, sizes: Sizes, tokens: Any) -> Any:
    wide = np.maximum(sizes.element, FP32)
    if model.norm == "rmsnorm":
        return tokens * ((2 * wide - sizes.element) * model.hidden + wide)
    return tokens * 2 * sizes.element
