"""Names of the model's tensors in other programs' checkpoints.

    ours, in blocks              the model's own (split)                        in a checkpoint of the base model alone
    3.self_attn.q_proj.weight    model.layers.2.self_attn.q_proj.weight         layers.2.self_attn.q_proj.weight

A split model records its own names; a built-in GPT has GPT-2's; all others use ours. Where most names of a checkpoint
are the model's except for a first part ("model.", "bert.", "transformer."), that prefix is removed or added to find
them.

The built-in GPT in the shape of GPT-2, under the names of transformers' checkpoints.

    ours                              GPT-2's
    0          tokens.weight          transformer.wte.weight
    1 … depth  attention.qkv.weight   transformer.h.{layer}.attn.c_attn.weight, transposed
    depth + 1  head.weight            lm_head.weight, or transformer.wte.weight where it is tied

Linear layers of transformers' GPT-2 are "Conv1D": weights of (in, out). Properties that shapes do not show (heads,
activation, epsilon) are checked against the folder's `config.json`, and written to it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from quintsched.errors import InputError, MisfitError, nearest
from quintsched.files.strictjson import describe_faults

from ...models.gpt import Embedding, GptBlock, GptHead
from ...models.layers import Attention, Mlp
from ..lazy_tensors import StoredTensor

MOST_NAMED = 5
"""Number of names that an error lists."""

OLD_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias|attention\.rotary_emb\.inv_freq)$"
)
"""Computed buffers that older versions of transformers saved nevertheless."""


@dataclass(frozen=True)
class TensorOrigin:
    """Source of a tensor in a checkpoint; "{layer}" in its name is the number of the transformer block, from 0."""

    name: str
    transposed: bool = False
    is_cut_short: bool = False
    """Whether only the first rows are read where there are more."""
    alike: tuple[str, ...] = ()
    """Further names of the same tensor: those present must hold equal numbers."""
    otherwise: str | None = None
    """Name of the tensor to read where none of these names is present."""

    def layer_origin(self, layer: int) -> TensorOrigin:
        """Return the origin of one layer's tensor."""
        return replace(self, name=self.name.format(layer=layer))

    def stored(self, tensors: Mapping[str, StoredTensor], prefix: Prefix) -> dict[str, StoredTensor]:
        """Return the stored tensors of it: under each of its names that is present, or else the alternative."""
        in_file = dict.fromkeys(prefix.in_file(name) for name in (self.name, *self.alike))
        found = {name: tensors[name] for name in in_file if name in tensors}
        if found or self.otherwise is None:
            return found
        instead = prefix.in_file(self.otherwise)
        return {instead: tensors[instead]} if instead in tensors else {}


@dataclass(frozen=True)
class Prefix:
    """First part of names that a checkpoint lacks (`strips`), or has in addition (`adds`)."""

    strips: str = ""
    adds: str = ""

    def in_file(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of the model."""
        return self.adds + name.removeprefix(self.strips)


def find_prefix(names: Iterable[str], found: Collection[str]) -> Prefix:
    """Return the prefix with which most of the model's names are found; no prefix wins a tie."""
    names = list(dict.fromkeys(names))
    first_parts = dict.fromkeys(name.partition(".")[0] + "." for name in names if "." in name)
    added = dict.fromkeys(name.partition(".")[0] + "." for name in found if "." in name)
    tried = [Prefix(), *(Prefix(strips=part) for part in first_parts), *(Prefix(adds=part) for part in added)]
    return max(tried, key=lambda prefix: sum(prefix.in_file(name) in found for name in names))


def join_tied(origins: Mapping[str, TensorOrigin], groups: Iterable[Sequence[str]]) -> dict[str, TensorOrigin]:
    """Add to each tied tensor's origin the names of the others; `groups` are our names."""
    joined = dict(origins)
    for group in groups:
        held = [name for name in group if name in origins]
        for name in held:
            mine = joined[name]
            others = dict.fromkeys([*mine.alike, *(origins[partner].name for partner in held)])
            joined[name] = replace(mine, alike=tuple(other for other in others if other != mine.name))
    return joined


def require_names(
    where: Path,
    found: Collection[str],
    used: Collection[str],
    lacking: Mapping[str, str],
    fresh: Iterable[str],
    *,
    strict: bool,
) -> tuple[str, ...]:
    """Return the tensors of a checkpoint that no weight takes; with `strict` there may be none.

    Args:
        where: the checkpoint.
        found: names of its tensors.
        used: those that weights take.
        lacking: missing tensors, as {name in the checkpoint: our name}.
        fresh: patterns on names of either kind that may be missing.
        strict: whether a tensor that no weight takes is an error.

    Raises `InputError` for missing tensors, `MisfitError` for extra ones.
    """
    unused = tuple(name for name in found if name not in used)
    missing = {
        name: ours for name, ours in lacking.items() if not any(fnmatchcase(n, p) for n in (name, ours) for p in fresh)
    }
    if missing:
        first, *others = missing
        more = f", nor {_listed(others)}" if others else ""
        raise InputError(
            f"{where}: the checkpoint has no tensor {first!r} (for {missing[first]}){more}"
            f"{nearest(first, unused or found)}; where these weights are to keep their initial values, say so with "
            f"fresh={[*missing][:MOST_NAMED]!r} (in a job, model.fresh)"
        )
    if unused and strict:
        raise MisfitError(
            f"{where}: the model has no weight for {_listed(unused)} of the checkpoint{nearest(unused[0], used)}; "
            "leave that out with strict=False (in a job, model.strict: false)"
        )
    return unused


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more


NEEDS = "norm: layernorm, positions: learned, activation: gelu_tanh, biases, and no kv_heads, head_size or qk_norm"
LM_HEAD_NAME = "lm_head.weight"
TOKEN_EMBEDDING_NAME = "transformer.wte.weight"
_LAYER = re.compile(r"(?:transformer\.)?h\.(\d+)\.")
_APPROXIMATIONS = {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


def _norm(ours: str, theirs: str) -> dict[str, TensorOrigin]:
    return {f"{ours}.{kind}": TensorOrigin(f"transformer.{theirs}.{kind}") for kind in ("weight", "bias")}


def _conv1d(ours: str, theirs: str) -> dict[str, TensorOrigin]:
    return {
        f"{ours}.weight": TensorOrigin(f"transformer.{theirs}.weight", transposed=True),
        f"{ours}.bias": TensorOrigin(f"transformer.{theirs}.bias"),
    }


_FIRST = {
    "tokens.weight": TensorOrigin(TOKEN_EMBEDDING_NAME),
    "positions.weight": TensorOrigin("transformer.wpe.weight", is_cut_short=True),
}
_LAYERS = {
    **_norm("norm1", "h.{layer}.ln_1"),
    **_conv1d("attention.qkv", "h.{layer}.attn.c_attn"),
    **_conv1d("attention.proj", "h.{layer}.attn.c_proj"),
    **_norm("norm2", "h.{layer}.ln_2"),
    **_conv1d("mlp.fc1", "h.{layer}.mlp.c_fc"),
    **_conv1d("mlp.fc2", "h.{layer}.mlp.c_proj"),
}
_LAST = {**_norm("norm", "ln_f"), "head.weight": TensorOrigin(LM_HEAD_NAME, otherwise=TOKEN_EMBEDDING_NAME)}


def is_gpt(blocks: Sequence[nn.Module]) -> bool:
    """Whether these are the blocks of a built-in GPT, of whatever options."""
    kinds = [type(block) for block in blocks]
    return len(kinds) > 1 and kinds == [Embedding, *[GptBlock] * (len(kinds) - 2), GptHead]


def gpt2_origins(blocks: Sequence[nn.Module]) -> dict[str, TensorOrigin]:
    """Return the origins of a GPT's tensors, by our names.

    Raises `MisfitError` for one of other options than GPT-2's.
    """
    origins = {}
    for number, block in enumerate(blocks):
        table = _FIRST if number == 0 else _LAST if number == len(blocks) - 1 else _LAYERS
        odd = sorted({name for name, _ in block.named_parameters(remove_duplicate=False)} ^ table.keys())
        if odd:
            where = "the checkpoint" if odd[0] in table else "the model"
            raise MisfitError(
                f"the model is no gpt2: only {where} has {odd[0]!r} in block {number}; gpt2 checkpoints need a gpt "
                f"with {NEEDS}"
            )
        if isinstance(block, GptBlock) and block.attention.proj.in_features != block.attention.proj.out_features:
            raise MisfitError(f"the model is no gpt2: its heads are not as wide as hidden; it needs a gpt with {NEEDS}")
        origins.update({f"{number}.{name}": origin.layer_origin(number - 1) for name, origin in table.items()})
    return origins


class _Gpt2Config(BaseModel):
    """Settings in a GPT-2's `config.json` that shapes do not show; each default is that of the format."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    n_embd: int | None = Field(default=None, ge=1)
    n_head: int | None = Field(default=None, ge=1)
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


def require_gpt2(blocks: Sequence[nn.Module], names: Collection[str], config: Mapping[str, Any]) -> None:
    """Raise `MisfitError` for another depth, other heads, activation or epsilon, or attention scaled otherwise."""
    matches = [match for name in names if (match := _LAYER.match(name))]
    layers, depth = 1 + max((int(match[1]) for match in matches), default=-1), len(blocks) - 2
    if layers != depth:
        raise MisfitError(f"the checkpoint has {layers} layers, the model {depth}; set depth: {layers}")
    try:
        theirs = _Gpt2Config.model_validate(config)
    except ValidationError as error:
        raise MisfitError(f"its config.json: {describe_faults(error)}") from None
    if not theirs.scale_attn_weights or theirs.scale_attn_by_inverse_layer_idx:
        raise MisfitError("the checkpoint's attention is not scaled by the width of a head alone")
    for block in blocks:
        _require_like(block, theirs)


def _require_like(block: nn.Module, theirs: _Gpt2Config) -> None:
    activation, epsilon = theirs.activation_function, theirs.layer_norm_epsilon
    head_dim = None if theirs.n_embd is None or theirs.n_head is None else theirs.n_embd // theirs.n_head
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


def gpt2_config(blocks: Sequence[nn.Module], *, tied: bool, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of a GPT in GPT-2's shape, from which transformers builds the same model."""
    embedding = blocks[0]
    assert isinstance(embedding, Embedding)
    assert embedding.positions is not None
    modules = [module for block in blocks for module in block.modules()]
    attention = next((module for module in modules if isinstance(module, Attention)), None)
    mlp = next((module for module in modules if isinstance(module, Mlp)), None)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": embedding.tokens.num_embeddings,
        "n_positions": embedding.positions.num_embeddings,
        "n_embd": embedding.tokens.embedding_dim,
        "n_layer": len(blocks) - 2,
        "tie_word_embeddings": tied,
        "layer_norm_epsilon": next(module.eps for module in modules if isinstance(module, nn.LayerNorm)),
        "embd_pdrop": embedding.dropout.p,
        "resid_pdrop": embedding.dropout.p,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
    if attention is not None and mlp is not None:
        config["n_head"] = embedding.tokens.embedding_dim // attention.head_dim
        config["n_inner"] = mlp.fc1.out_features
        config["activation_function"] = "gelu_new" if mlp.approximate == "tanh" else "gelu"
    return config
