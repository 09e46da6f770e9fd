"""Families of pretrained checkpoints: what their tensors are called, and which options of a model they fit.

    ours                              GPT-2's
    0          tokens.weight          wte.weight
    1 … depth  attention.qkv.weight   h.{layer}.attn.c_attn.weight, transposed
    depth + 1  head.weight            lm_head.weight, or wte.weight where it is tied

A family is a table for each of the three kinds of blocks, and a check of what shapes do not show. Another family is
one more of them.

Source: the GPT-2 of Hugging Face's transformers, whose products are "Conv1D": weights of (in, out).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from quintsched.errors import MisfitError

from ..models.layers import Attention, Mlp


@dataclass(frozen=True)
class Origin:
    """Where a weight is found in a checkpoint; "{layer}" is the number of the transformer block, from 0."""

    name: str
    transposed: bool = False
    is_cut_short: bool = False
    """Whether the first rows are taken where there are more."""
    otherwise: str | None = None
    """The tensor that is read instead where there is none of that name."""

    def at(self, layer: int) -> Origin:
        """Return where the weight of one layer is found."""
        return replace(self, name=self.name.format(layer=layer))


@dataclass(frozen=True)
class Family:
    """Checkpoints that are alike: tables from the names in a block to those in the file, and what fits them."""

    name: str
    first: Mapping[str, Origin]
    layer: Mapping[str, Origin]
    last: Mapping[str, Origin]
    prefixes: tuple[str, ...]
    """What names may begin with."""
    layer_pattern: str
    """A regular expression for names without their prefix, whose group is the number of the layer."""
    needs: str
    """The options that a model must have, in words."""
    require: Callable[[nn.Module, Mapping[str, Any]], None]
    """Raises `MisfitError` for a block that `config.json` does not fit, in what shapes do not show."""

    def origins(self, number: int, num_blocks: int) -> dict[str, Origin]:
        """Return where the weights of a block come from, by their names in it."""
        table = self.first if number == 0 else self.last if number == num_blocks - 1 else self.layer
        return {name: origin.at(number - 1) for name, origin in table.items()}


def _norm(ours: str, theirs: str) -> dict[str, Origin]:
    return {f"{ours}.{kind}": Origin(f"{theirs}.{kind}") for kind in ("weight", "bias")}


def _conv1d(ours: str, theirs: str) -> dict[str, Origin]:
    return {
        f"{ours}.weight": Origin(f"{theirs}.weight", transposed=True),
        f"{ours}.bias": Origin(f"{theirs}.bias"),
    }


class _Gpt2Config(BaseModel):
    """What a GPT-2's `config.json` says that shapes do not; each default is that of the format."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    n_embd: int | None = Field(default=None, ge=1)
    n_head: int | None = Field(default=None, ge=1)
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @property
    def head_dim(self) -> int | None:
        """Return the width of a head, where it is known."""
        return None if self.n_embd is None or self.n_head is None else self.n_embd // self.n_head


_APPROXIMATIONS = {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


def _require_gpt2(block: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise `MisfitError` for other heads, another activation, another epsilon, or attention scaled otherwise."""
    theirs = _Gpt2Config.model_validate(config)
    activation, head_dim, epsilon = theirs.activation_function, theirs.head_dim, theirs.layer_norm_epsilon
    if not theirs.scale_attn_weights or theirs.scale_attn_by_inverse_layer_idx:
        raise MisfitError("the checkpoint's attention is not scaled by the width of a head alone")
    for module in block.modules():
        if isinstance(module, Mlp) and module.approximate != _APPROXIMATIONS.get(activation):
            ours = "gelu_tanh" if module.approximate == "tanh" else "gelu"
            raise MisfitError(
                f"the checkpoint's activation is {activation} (gelu_new where no config.json says otherwise), the "
                f"model's is {ours}; gelu_new is called gelu_tanh here"
            )
        if isinstance(module, Attention) and head_dim not in (None, module.head_dim):
            raise MisfitError(
                f"the checkpoint has heads of width {head_dim}, the model {module.head_dim}; set heads: {theirs.n_head}"
            )
        if isinstance(module, nn.LayerNorm) and module.eps != epsilon:
            raise MisfitError(f"the checkpoint's layer norms have the epsilon {epsilon}, the model's {module.eps}")


GPT2 = Family(
    name="gpt2",
    first={
        "tokens.weight": Origin("wte.weight"),
        "positions.weight": Origin("wpe.weight", is_cut_short=True),
    },
    layer={
        **_norm("norm1", "h.{layer}.ln_1"),
        **_conv1d("attention.qkv", "h.{layer}.attn.c_attn"),
        **_conv1d("attention.proj", "h.{layer}.attn.c_proj"),
        **_norm("norm2", "h.{layer}.ln_2"),
        **_conv1d("mlp.fc1", "h.{layer}.mlp.c_fc"),
        **_conv1d("mlp.fc2", "h.{layer}.mlp.c_proj"),
    },
    last={**_norm("norm", "ln_f"), "head.weight": Origin("lm_head.weight", otherwise="wte.weight")},
    prefixes=("", "transformer."),
    layer_pattern=r"h\.(\d+)\.",
    needs="norm: layernorm, positions: learned, activation: gelu_tanh, and no kv_heads",
    require=_require_gpt2,
)
