"""A causal transformer (GPT-2's shape) as a list of blocks, any cut of which is a pipeline stage.

    ids (B,S) ─▶ Embedding ─▶ (B,S,D) ─▶ Block × depth ─▶ (B,S,D) ─▶ Head ─▶ logits (B,S,V)

S is the length of a sequence, D is `hidden`, V the number of token ids. The targets of a data set are the inputs
shifted by one; the model does not shift. Names, initialisation from torch's global generator and the way in which
tensor parallelism cuts a block are as in `vit`.

A sequence may come in slices (`seq-1f1b`). Blocks then get `past`, which knows how many positions came before, and
joins the keys and values of an attention to those of the slices before:

    slice 0   q ◣        slice 1   q ■◣       row: a query of the slice; column: a key so far
              k  0                 k  0 1

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", with its initialisation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from quintsched.errors import MisfitError, UsageError

from ..context_parallel import Context
from ..data import DataSpec
from ..settings import Settings
from ..slices import Past

INITIAL_DEVIATION = 0.02


class GPTOptions(Settings):
    """The sizes of a causal transformer."""

    hidden: int = Field(default=64, ge=1)
    """Width of a token."""
    depth: int = Field(default=4, ge=1)
    """Number of transformer blocks; the embedding and the head are one block more each."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide `hidden`."""
    mlp_ratio: int = Field(default=4, ge=1)
    """Width of the MLP as a multiple of `hidden`."""
    tied: bool = False
    """The head uses the embedding's weight; the engine then keeps the two equal."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> GPTOptions:
        if self.hidden % self.heads:
            raise UsageError(f"gpt: hidden={self.hidden} does not divide into heads={self.heads}")
        return self


def gpt(data: DataSpec, options: GPTOptions) -> list[Callable[[], nn.Module]]:
    """Return one builder per block: the embedding, `depth` transformer blocks and the head.

    `data.input_shape` is (S,), the longest sequence; `data.num_classes` is the number of token ids.
    Raises MisfitError where the samples are not sequences.
    """
    if len(data.input_shape) != 1:
        raise MisfitError(f"gpt needs sequences of token ids (S,), but a sample has the shape {data.input_shape}")
    block = partial(Block, options.hidden, options.heads, options.hidden * options.mlp_ratio, options.depth)
    return [
        partial(Embedding, data.num_classes, data.input_shape[0], options.hidden),
        *[block] * options.depth,
        partial(Head, options.hidden, data.num_classes),
    ]


def gpt_tied(options: GPTOptions) -> dict[str, tuple[str, ...]]:
    """Return which weights are one, by their names in the whole model."""
    return {"embedding": ("0.tokens.weight", f"{options.depth + 1}.head.weight")} if options.tied else {}


class Embedding(nn.Module):
    """Token ids to tokens: int64 (B, S) → (B, S, D), learned positions added."""

    def __init__(self, num_tokens: int, length: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, hidden)
        self.positions = nn.Embedding(length, hidden)
        _initialise(self)

    def forward(self, ids: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        """Embed the ids; their positions start behind those of the slices before, or are those of the context.

        Raises MisfitError for a sequence that is too long.
        """
        start = 0 if past is None else past.seen
        end = start + ids.shape[1] if context is None else context.length
        if end > self.positions.num_embeddings:
            raise MisfitError(f"gpt was built for {self.positions.num_embeddings} positions; a sequence has {end}")
        positions = torch.arange(start, end, device=ids.device) if context is None else context.positions
        embedded: Tensor = self.tokens(ids) + self.positions(positions)
        return embedded


class Block(nn.Module):
    """A pre-norm transformer block: (B, S, D) → (B, S, D).

    What its two halves add starts smaller the more blocks of `depth` add up.
    """

    def __init__(self, hidden: int, num_heads: int, mlp_hidden: int, depth: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, num_heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, mlp_hidden)
        _initialise(self)
        for last in (self.attention.proj, self.mlp.fc2):
            nn.init.normal_(last.weight, std=INITIAL_DEVIATION / sqrt(2 * depth))

    def forward(self, tokens: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        """Attend to what came before, then transform each token; both are residual."""
        attended: Tensor = tokens + self.attention(self.norm1(tokens), past, context)
        out: Tensor = attended + self.mlp(self.norm2(attended))
        return out


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, S, D) → (B, S, D).

    The rows of `qkv` are those of q, of k and of v, three equal parts, each ordered by head. How many heads are
    here follows from the width of what `qkv` returns: a tensor-parallel rank holds a slice of each part.
    """

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden // num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, tokens: Tensor, past: Past | None, context: Context | None = None) -> Tensor:
        """Let each token attend to itself and to those before it, also in earlier slices and on other ranks."""
        batch, length, _ = tokens.shape
        parts: Tensor = self.qkv(tokens).view(batch, length, 3, -1, self.head_dim)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if context is not None:
            mixed = context.attend(query, key, value)
        elif past is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # B, heads here, S, head_dim
        else:
            key, value = past.extend(self, key, value)
            mask = causal_lower_right(length, key.shape[-2])
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Two linear layers with a GELU between them: (…, D) → (…, D)."""

    def __init__(self, hidden: int, mlp_hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, mlp_hidden)
        self.fc2 = nn.Linear(mlp_hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Transform each token on its own."""
        out: Tensor = self.fc2(F.gelu(self.fc1(tokens)))
        return out


class Head(nn.Module):
    """Logits of the token that comes next: (B, S, D) → (B, S, V). `head` has the embedding's shape and no bias."""

    def __init__(self, hidden: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, num_tokens, bias=False)
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Normalise, and compare with every token id."""
        out: Tensor = self.head(self.norm(tokens))
        return out


def _initialise(module: nn.Module) -> None:
    """Draw the weights of all products and lookups, so that an embedding and a head start alike; biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
