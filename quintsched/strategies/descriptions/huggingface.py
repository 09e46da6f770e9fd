"""Reader of transformers' `config.json`: sizes of a model by the names that its family uses.

    {"model_type": "llama", "hidden_size": 4096, …}  ──▶  {"hidden": 4096, …, "activation": "swiglu", "norm": "rmsnorm"}

A family gives its names of sizes, the properties that all its models share, and defaults for keys that a file omits.
Options that a description cannot express (scaled rotations, windows of other families than GPT-OSS) change no size and
are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quintsched.errors import InputError, suggest
from quintsched.files.strictjson import shorten


@dataclass(frozen=True)
class _Family:
    """Reading rule for the models of one `model_type`."""

    fixed: Mapping[str, object]
    """Properties that they share, by `Model`'s names."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further names of a size, by `Model`'s name."""
    tied: bool = False
    """Whether the head is tied to the embedding by default."""
    dropout: bool = False


_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
}
_LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "biases": False}
_GPT = {"activation": "gelu", "positions": "learned"}
_FALCON = {"activation": "gelu", "positions": "rope", "biases": False}

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(_LLAMA),
    "mistral": _Family(_LLAMA),
    "phi3": _Family(_LLAMA),
    "qwen2": _Family(_LLAMA | {"qkv_biases": True}),
    "qwen3": _Family(_LLAMA | {"qk_norm": True}),
    "gemma": _Family(_LLAMA | {"activation": "geglu"}, tied=True),
    "mixtral": _Family(_LLAMA),
    "qwen3_moe": _Family(_LLAMA | {"qk_norm": True}),
    "qwen3_next": _Family(_LLAMA | {"qk_norm": True, "attention_gate": True}),
    "deepseek_v2": _Family(_LLAMA),
    "deepseek_v3": _Family(_LLAMA),
    "gpt_oss": _Family(_LLAMA | {"biases": True, "sinks": True}),
    "cohere": _Family(_LLAMA | {"norm": "layernorm", "norm_biases": False, "parallel_block": 1}, tied=True),
    "falcon": _Family(_FALCON, {"kv_heads": ("num_kv_heads",)}, tied=True),
    "gpt2": _Family(_GPT, tied=True, dropout=True),
    "gpt_neox": _Family({"activation": "gelu", "positions": "rope"}),
    "opt": _Family(_GPT | {"activation": "relu", "extra_positions": 2}, tied=True, dropout=True),
    "bloom": _Family({"activation": "gelu", "positions": "alibi", "embedding_norm": True}, tied=True),
    "mpt": _Family({"activation": "gelu"}, tied=True),
    "vit": _Family({"activation": "gelu", "vocab": 0, "causal": False}),
}


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Model`; raises `InputError` for an unknown family, or an unsupported option."""
    kind = str(config["model_type"])
    if kind not in _FAMILIES:
        raise InputError(
            f"/model_type: no description of {shorten(kind)!r} is read{suggest(kind, _FAMILIES)}; "
            "give its sizes in a file of your own"
        )
    family = _FAMILIES[kind]
    found = {"name": kind} | dict(family.fixed) | _sizes(config)
    found["tied"] = config.get("tie_word_embeddings", family.tied) and kind != "vit"
    found["dropout"] = _drops(config, family)
    rotary = config.get("rope_parameters") or config
    if isinstance(rotary, Mapping) and rotary.get("rope_theta"):
        found["rope_base"] = float(rotary["rope_theta"])
    return found | _attention(config) | _experts(config) | _own(kind, config)


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    given = {ours: [config[name] for name in names if config.get(name)] for ours, names in _NAMES.items()}
    return {ours: values[0] for ours, values in given.items() if values}


def _drops(config: Mapping[str, Any], family: _Family) -> bool:
    rates = [rate for name, rate in config.items() if "drop" in name and isinstance(rate, int | float)]
    return any(rate > 0 for rate in rates) if rates else family.dropout


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("kv_lora_rank"):
        latent = {
            "kv_rank": config["kv_lora_rank"],
            "q_rank": config.get("q_lora_rank") or 0,
            "rope_size": config.get("qk_rope_head_dim", 64),
            "value_size": config.get("v_head_dim", 128),
        }
        return {"latent": latent, "head_size": config.get("qk_nope_head_dim", 128), "kv_heads": None}
    return {"qkv_biases": True} if config.get("attention_bias") else {}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mixture of experts, whose sizes have three sets of names."""
    counts = [config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(name)]
    if not counts:
        return {}
    if config.get("mlp_only_layers"):
        raise InputError("/mlp_only_layers: layers without experts in places of their own are not described")
    width = config.get("shared_expert_intermediate_size")  # of Qwen's, which are one and gated
    experts = {
        "count": counts[0],
        "top_k": config.get("num_experts_per_tok", 2),
        "ffn": config.get("moe_intermediate_size") or config.get("intermediate_size"),
        "shared": config.get("n_shared_experts") or (width or 0) // (config.get("moe_intermediate_size") or 1),
        "shared_gate": width is not None,
        "first_dense": config.get("first_k_dense_replace") or 0,
        "every": config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1,
        "nodes": config.get("topk_group"),
    }
    return {"experts": experts}


def _own(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that only one family has."""
    if kind == "mpt":
        attention = config.get("attn_config") or {}
        has_biases = not config.get("no_bias", True)
        return {
            "ffn": config.get("expansion_ratio", 4) * config["d_model"] if "d_model" in config else None,
            "biases": has_biases,
            "norm_biases": has_biases,
            "positions": "alibi" if attention.get("alibi", True) else "learned",
        }
    if kind == "qwen3_next":
        of_delta = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        given = zip(("key_heads", "value_heads", "key_size", "value_size", "convolution"), of_delta, strict=True)
        delta = {ours: config[f"linear_{name}"] for ours, name in given}
        return {"delta": delta | {"except_every": config.get("full_attention_interval", 4)}}
    if kind == "gpt_neox":
        return {"parallel_block": 2 if config.get("use_parallel_residual", True) else 0}
    if kind == "cohere":
        return {"qk_norm": config.get("use_qk_norm", False)}
    if kind == "falcon":
        return _falcon(config)
    if kind == "gpt_oss":  # windows in every second layer
        return {"window": config.get("sliding_window"), "window_except": 2}
    if kind == "opt" and config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size"):
        raise InputError("/word_embed_proj_dim: an embedding of another width than the layers is not described")
    if kind == "vit":
        return {
            "images": {
                "size": config.get("image_size", 224),
                "patch": config.get("patch_size", 16),
                "channels": config.get("num_channels", 3),
                "classes": len(config.get("id2label") or {}) or config.get("num_labels", 1000),
            }
        }
    return {}


def _falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the two generations of Falcon."""
    is_new, heads = config.get("new_decoder_architecture", False), config.get("num_attention_heads", 71)
    norms = (config.get("num_ln_in_parallel_attn") or 2) if is_new else 1
    return {
        "kv_heads": config.get("num_kv_heads") or heads if is_new else 1 if config.get("multi_query", True) else heads,
        "parallel_block": norms if is_new or config.get("parallel_attn", True) else 0,
        "positions": "alibi" if config.get("alibi") else "rope",
        "biases": config.get("bias", False),
    }
