"""Families of transformers: tiny configurations of each, all without dropout.

Options are the configuration's own names. `SIZES` are those that most models share, `LLAMA` today's causal ones.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .catalogue import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Family,
    embedded_words,
    padded_words,
    pictures,
    spoken_words,
    translated_words,
    words,
)

IDS: Mapping[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN: Mapping[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES: Mapping[str, Any] = HIDDEN | IDS | {"intermediate_size": 48, "max_position_embeddings": 64}
N: Mapping[str, Any] = IDS | {"n_positions": 64, "n_embd": WIDTH, "n_layer": 4, "n_head": 4}
"""Sizes by the names of GPT-2."""


def without(*dropouts: str) -> dict[str, float]:
    """Return dropouts of zero."""
    return dict.fromkeys(dropouts, 0.0)


LLAMA: Mapping[str, Any] = SIZES | {"num_key_value_heads": 2} | without("attention_dropout")
BERT: Mapping[str, Any] = SIZES | without("hidden_dropout_prob", "attention_probs_dropout_prob")
PICTURES: Mapping[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES}
IN_TURN: Mapping[str, Any] = {"experts_implementation": "eager"}
"""Experts one after the other: the product of all at once knows no float64."""
GEMMA: Mapping[str, Any] = LLAMA | {"head_dim": 8}
WINDOWED: Mapping[str, Any] = GEMMA | {"sliding_window": 4, "query_pre_attn_scalar": 8}

CAUSAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "olmo2", "cohere", "smollm3"), LLAMA),
    **dict.fromkeys(("qwen3", "gemma", "glm"), GEMMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), WINDOWED),
    **dict.fromkeys(("phi", "phi3"), LLAMA | without("resid_pdrop", "embd_pdrop")),
    "mistral": LLAMA | {"sliding_window": 4},
    "stablelm": LLAMA | without("hidden_dropout"),
    "granite": LLAMA | {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "starcoder2": LLAMA | without("residual_dropout", "embedding_dropout"),
    "gpt2": N | without("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gptj": N | {"rotary_dim": 4} | without("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": SIZES | {"rotary_pct": 0.5} | without("attention_dropout", "hidden_dropout"),
    "opt": SIZES | {"word_embed_proj_dim": WIDTH, "ffn_dim": 48} | without("dropout"),
    "bloom": IDS | {"hidden_size": WIDTH, "n_layer": 4, "n_head": 4} | without("hidden_dropout", "attention_dropout"),
    "falcon": HIDDEN | IDS | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": IDS | {"d_model": WIDTH, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": LLAMA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
}

DISTILBERT = {"dim": WIDTH, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 64}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "pooler_dropout": 0.0}
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": BERT,
    "roberta": BERT | {"max_position_embeddings": 66},
    "electra": BERT | {"embedding_size": 16},
    "albert": BERT | {"embedding_size": 16, "num_hidden_groups": 4},
    "distilbert": {"vocab_size": VOCABULARY, "pad_token_id": 0} | DISTILBERT | without("dropout", "attention_dropout"),
    "deberta-v2": BERT | DEBERTA,
}

VISION: Mapping[str, str] = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassification"}

CACHELESS: Mapping[str, Any] = {"vocab_size": VOCABULARY, "d_model": WIDTH, "pad_token_id": 0, "use_cache": False}
T5: Mapping[str, Any] = CACHELESS | {
    **{"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0},
}
WHISPER: Mapping[str, Any] = CACHELESS | {
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))},
    **{"bos_token_id": 1, "eos_token_id": 2, "num_mel_bins": 16, "max_source_positions": LENGTH},
    **{"max_target_positions": 64, "dropout": 0.0, "decoder_start_token_id": 1},
}  # fmt: skip
CLIP: Mapping[str, Any] = SIZES | {"projection_dim": WIDTH}


def _made(kind: str, options: Mapping[str, Any], model_class: str) -> nn.Module:
    """Build a model by the class's name; with an automatic class, by the configuration's kind."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    found = getattr(transformers, model_class)
    return found.from_config(config, **IN_TURN) if model_class.startswith("Auto") else found(config)


def _family(
    kind: str, options: Mapping[str, Any], model_class: str, batch: Any = words, *, causal: bool = False, name: str = ""
) -> Family:
    return Family(name or kind, "transformers", lambda: _made(kind, options, model_class), batch, causal)


FAMILIES: tuple[Family, ...] = (
    *(_family(kind, options, "AutoModelForCausalLM", causal=True) for kind, options in CAUSAL.items()),
    *(_family(kind, options, "AutoModelForMaskedLM", padded_words) for kind, options in ENCODERS.items()),
    *(_family(kind, BERT | PICTURES, name, pictures(16)) for kind, name in VISION.items()),
    _family("t5", T5, "T5ForConditionalGeneration", translated_words),
    _family("whisper", WHISPER, "WhisperForConditionalGeneration", spoken_words),
    _family("clip_text_model", CLIP, "CLIPTextModelWithProjection", embedded_words, causal=True, name="clip text"),
)
