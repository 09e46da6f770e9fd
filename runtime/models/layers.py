"""Halves of a transformer block in their variants: causal attention, and the MLP applied to each token.

    heads = 4, kv_heads = 2         q0 q1 q2 q3          query heads share the keys and values of their group, which
                                     ╲╱    ╲╱            are computed, cached and sent half as large
                                     k0    k1

    rotary positions                a pair of features (x, y) at position p is rotated by p · angle, so that the product
                                    of a query and a key depends on their distance alone

    norms of heads                  queries and keys of each head are normalised by themselves, before they are rotated

Tensor parallelism relies on the names and order of the projections (see `split_rules`).

Sources: Ainslie et al. 2023, "GQA" (grouped queries); Su et al. 2021, "RoFormer" (rotary positions, here with the
features x in the first half of a head and y in the second, as in LLaMA); Shazeer 2020, "GLU Variants" (SwiGLU);
Henry et al. 2020, "Query-Key Normalization" (norms of heads, here RMSNorm, as in Qwen3).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError

from ..autograd.slice_kv_cache import Past
from ..parallel.context.context_parallel import Context

ROTARY_BASE = 10_000.0
"""Base of rotary frequencies: the slowest pair of features turns about once in 2π times so many positions."""
NORM_EPSILON = 1e-5


class Rotary(nn.Module):
    """Rotates queries and keys by position: (B, heads, S, head_dim) → the same shape, up to `length` positions."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, head_dim: int, length: int, base: float = ROTARY_BASE) -> None:
        super().__init__()
        speeds = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(length, dtype=torch.float64).outer(speeds)
        for name, table in (("cosines", angles.cos()), ("sines", angles.sin())):
            self.register_buffer(name, table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, heads: Tensor, start: int, context: Context | None = None) -> Tensor:
        """Rotate by the positions from `start` on, or by those of the context.

        Raises MisfitError where positions are too many.
        """
        end = start + heads.shape[-2] if context is None else context.length
        require_room(end, len(self.cosines))
        places = slice(start, end) if context is None else context.positions
        cosines, sines = self.cosines[places], self.sines[places]
        x, y = heads.chunk(2, -1)
        return torch.cat([x * cosines - y * sines, y * cosines + x * sines], -1)


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, S, D) → (B, S, D).

    With as many key and value heads as query heads one linear layer computes all three; its rows are those of q, of k
    and of v, three equal blocks, each ordered by head. With fewer (`num_kv_heads`), queries, keys and values have a
    layer each. The number of local heads follows from the width of their outputs: a tensor-parallel rank holds a slice.
    A head has `head_dim` features (None: hidden / heads). With `qk_norm`, queries and keys are normalised by head.
    """

    tensor_partial: ClassVar = ("q_norm.weight", "k_norm.weight")

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        rotary: Rotary | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = hidden // num_heads if head_dim is None else head_dim
        self.is_grouped = self.num_kv_heads != num_heads
        width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.is_grouped:
            self.q_proj = nn.Linear(hidden, width, bias)
            self.k_proj = nn.Linear(hidden, kv_width, bias)
            self.v_proj = nn.Linear(hidden, kv_width, bias)
        else:
            self.qkv = nn.Linear(hidden, 3 * width, bias)
        self.proj = nn.Linear(width, hidden, bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPSILON) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=NORM_EPSILON) if qk_norm else None
        self.rotary = rotary

    def forward(
        self,
        tokens: Tensor,
        past: Past | None,
        context: Context | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Attend causally: each token to itself and earlier ones, also in earlier slices and on other ranks.

        With `document_ids`, int64 (B, S), only to those of its document. Raises MisfitError for them with a past or a
        context.
        """
        query, key, value = self._heads(tokens)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            start = 0 if past is None else past.seen
            query, key = self.rotary(query, start, context), self.rotary(key, start, context)
        if document_ids is not None:
            require_whole_sequences(past, context)
            mask = within_documents(document_ids)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.is_grouped)
        elif context is not None:
            mixed = context.attend(query, key, value)
        elif past is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.is_grouped)
        else:
            key, value = past.extend(self, key, value)
            from torch.nn.attention.bias import causal_lower_right  # a second to import, and few models need it

            mask = causal_lower_right(query.shape[-2], key.shape[-2])
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.is_grouped)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, heads here, S, head_dim) each."""
        if self.is_grouped:
            products = self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens)
            query, key, value = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in products)
        else:
            blocks: Tensor = self.qkv(tokens).unflatten(-1, (3, -1, self.head_dim))
            query, key, value = blocks.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, exact ("none") or by "tanh": (…, D) → (…, D)."""

    def __init__(self, hidden: int, mlp_hidden: int, approximate: str = "none", *, bias: bool = True) -> None:
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(hidden, mlp_hidden, bias)
        self.fc2 = nn.Linear(mlp_hidden, hidden, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        out: Tensor = self.fc2(F.gelu(self.fc1(tokens), approximate=self.approximate))
        return out


class SwiGlu(nn.Module):
    """Gated MLP (SwiGLU): (…, D) → (…, D).

    One linear layer computes the gates and the features, two equal blocks of its rows.
    """

    def __init__(self, hidden: int, mlp_hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * mlp_hidden, bias)
        self.fc2 = nn.Linear(mlp_hidden, hidden, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        gate, up = self.gate_up(tokens).chunk(2, -1)
        out: Tensor = self.fc2(F.silu(gate) * up)
        return out


def within_documents(document_ids: Tensor) -> Tensor:
    """Return the mask of causal attention within documents: (B, S) → bool (B, 1, query, key)."""
    causal = torch.ones(2 * document_ids.shape[1:], dtype=torch.bool, device=document_ids.device).tril()
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & causal


def require_whole_sequences(past: Past | None, context: Context | None) -> None:
    """Raise MisfitError where a rank has only a slice of each sequence."""
    if past is not None or context is not None:
        cut = "sequences come in slices" if context is None else "cp cuts sequences"
        raise MisfitError(
            f"gpt keeps attention within documents only in whole sequences, but {cut}; set data.options.mask_documents "
            "to false, or data.options.pack too, and keep documents apart by padding"
        )


def require_room(positions: int, length: int) -> None:
    """Raise MisfitError for a sequence that is longer than the model was built for."""
    if positions > length:
        raise MisfitError(f"gpt was built for {length} positions; a sequence has {positions}")
