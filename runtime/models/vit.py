"""Vision Transformer as a list of blocks, any cut of which is a pipeline stage.

    image (B,C,H,W) ─▶ PatchEmbedding ─▶ (B,T,D) ─▶ VitBlock × depth ─▶ (B,T,D) ─▶ VitHead ─▶ logits (B,K)

T is the number of patches plus one class token, D is `hidden`, K the number of classes. The modules carry the
usual names (`qkv`, `proj`, `fc1`, `fc2`), by which tensor parallelism cuts them. Initialisation draws from
torch's global generator only, so seeding it before a builder is called fixes the block.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", in the pre-norm form of timm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError, UsageError
from quintsched.strategies.descriptions.model import Images, Model

from ..data import DataSpec
from ..settings.engine_settings import Settings

SMALL_IMAGE = 16
"""Side in pixels below which images get patches of 2, others of 4."""


class ViTOptions(Settings):
    """Sizes of a Vision Transformer."""

    hidden: int = Field(default=64, ge=1)
    """Width of a token."""
    depth: int = Field(default=8, ge=1)
    """Number of transformer blocks; the embedding and the head are one block more each."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide `hidden`."""
    mlp_ratio: int = Field(default=4, ge=1)
    """Width of the MLP as a multiple of `hidden`."""
    patch: int | None = Field(default=None, ge=1)
    """Side of a square patch in pixels; none: 2 for images below 16 pixels, else 4."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of features that training drops from embedded tokens, and from the output of each half of a block."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ViTOptions:
        if self.hidden % self.heads:
            raise UsageError(f"vit: hidden={self.hidden} does not divide into heads={self.heads}")
        return self


def vit(data: DataSpec, options: ViTOptions) -> list[Callable[[], nn.Module]]:
    """Return one builder per block: the patch embedding, `depth` transformer blocks and the head.

    Raises MisfitError where the samples are not images (C, H, W), or do not divide into patches.
    """
    if len(data.input_shape) != 3:
        raise MisfitError(f"vit needs images of shape (C, H, W), but a sample has the shape {data.input_shape}")
    channels, height, width = data.input_shape
    patch = _patch(data, options)
    if height % patch or width % patch:
        raise MisfitError(f"vit: an image of {height} x {width} pixels does not divide into patches of {patch}")
    num_patches = (height // patch) * (width // patch)
    block = partial(VitBlock, options.hidden, options.heads, options.hidden * options.mlp_ratio, options.dropout)
    return [
        partial(PatchEmbedding, channels, patch, num_patches, options.hidden, options.dropout),
        *[block] * options.depth,
        partial(VitHead, options.hidden, data.num_classes),
    ]


def vit_sizes(data: DataSpec, options: ViTOptions) -> Model:
    """Return the model's sizes, for predictions; raises MisfitError where images are not square."""
    channels, height, width = data.input_shape
    if height != width:
        raise MisfitError(f"vit: predictions are for square images, but these have {height} x {width} pixels")
    images = Images(size=height, patch=_patch(data, options), channels=channels, classes=data.num_classes)
    return Model(
        name="vit",
        layers=options.depth,
        hidden=options.hidden,
        heads=options.heads,
        ffn=options.hidden * options.mlp_ratio,
        vocab=0,
        seq=images.tokens,
        tied=False,
        dropout=options.dropout > 0,
        causal=False,
        images=images,
    )


def _patch(data: DataSpec, options: ViTOptions) -> int:
    return options.patch or (2 if min(data.input_shape[1:]) < SMALL_IMAGE else 4)


class PatchEmbedding(nn.Module):
    """Images to tokens: (B, C, H, W) → (B, T, D), the class token first, learned positions added.

    Class token and positions are initialized as large as the patches, as in lucidrains' vit-pytorch. At the usual 0.02
    a small learning rate takes epochs to make them count: 79 % after one epoch of MNIST at 1e-4, against 93 %.
    """

    undecayed = ("class_token", "positions")

    def __init__(self, channels: int, patch: int, num_patches: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = patch
        self.proj = _linear(channels * patch * patch, hidden)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden))
        self.positions = nn.Parameter(torch.randn(1, num_patches + 1, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Cut (B, C, H, W) into patches, row by row, and embed them as (B, T, D)."""
        batch, channels, height, width = images.shape
        size = self.patch
        patches = images.reshape(batch, channels, height // size, size, width // size, size)
        tokens = self.proj(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        class_token = self.class_token.expand(len(images), -1, -1)
        out: Tensor = self.dropout(torch.cat([class_token, tokens], dim=1) + self.positions)
        return out


class VitBlock(nn.Module):
    """A pre-norm transformer block: (B, T, D) → (B, T, D)."""

    def __init__(self, hidden: int, num_heads: int, mlp_hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = VitAttention(hidden, num_heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = VitMlp(hidden, mlp_hidden)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend, then transform each token; both are residual."""
        attended: Tensor = tokens + self.dropout1(self.attention(self.norm1(tokens)))
        out: Tensor = attended + self.dropout2(self.mlp(self.norm2(attended)))
        return out


class VitAttention(nn.Module):
    """Multi-head self-attention: (B, T, D) → (B, T, D).

    The rows of `qkv` are those of q, of k and of v, three equal blocks, each ordered by head. The number of
    local heads follows from the width of `qkv`'s output: a tensor-parallel rank holds a shard of each block.
    """

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden // num_heads
        self.qkv = _linear(hidden, 3 * hidden)
        self.proj = _linear(hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend from each token to all."""
        blocks: Tensor = self.qkv(tokens).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = blocks.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)  # B, heads here, T, head_dim
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class VitMlp(nn.Module):
    """Two linear layers with a GELU between them: (…, D) → (…, D)."""

    def __init__(self, hidden: int, mlp_hidden: int) -> None:
        super().__init__()
        self.fc1 = _linear(hidden, mlp_hidden)
        self.fc2 = _linear(mlp_hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        out: Tensor = self.fc2(F.gelu(self.fc1(tokens)))
        return out


class VitHead(nn.Module):
    """Logits from the class token: (B, T, D) → (B, K)."""

    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc = _linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify by the first token."""
        out: Tensor = self.fc(self.norm(tokens[:, 0]))
        return out


def _linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer with Xavier-uniform weights and zero bias."""
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
