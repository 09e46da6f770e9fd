"""Families of transformers: tiny configurations of each, all without dropout.

Options are the configuration's own names. `LLAMA` are those that most of today's causal models share.
"""

from __future__ import annotations

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

LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
BERT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PICTURES: Mapping[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES}
IN_TURN: Mapping[str, Any] = {"experts_implementation": "eager"}
"""Experts one after the other: the product of all at once knows no float64."""
IDS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CAUSAL: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 4},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8},
    "gemma": LLAMA | {"head_dim": 8},
    "gemma2": LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "phi": LLAMA | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": LLAMA | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo2": LLAMA,
    "stablelm": LLAMA | {"hidden_dropout": 0.0},
    "cohere": LLAMA,
    "glm": LLAMA | {"head_dim": 8},
    "granite": LLAMA | {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "starcoder2": LLAMA | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "smollm3": LLAMA,
    "gpt2": IDS
    | {
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": WIDTH,
        "n_layer": 4,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gpt_neox": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    | {"hidden_dropout": 0.0, "rotary_pct": 0.5},
    "gptj": IDS
    | {
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": WIDTH,
        "n_layer": 4,
        "n_head": 4,
        "rotary_dim": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "opt": IDS
    | {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH,
        "ffn_dim": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "bloom": IDS
    | {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "n_layer": 4,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "falcon": IDS
    | {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "mpt": IDS | {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": LLAMA
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    },
}

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": BERT,
    "roberta": BERT | {"max_position_embeddings": 66},
    "electra": BERT | {"embedding_size": 16},
    "albert": BERT | {"embedding_size": 16, "num_hidden_groups": 4},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "hidden_dim": 48,
        "n_layers": 4,
        "n_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    },
    "deberta-v2": BERT
    | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "pooler_dropout": 0.0},
}

VISION: Mapping[str, str] = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassification"}

T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
WHISPER: Mapping[str, Any] = IDS | {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 16,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": LENGTH,
    "max_target_positions": 64,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
CLIP: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "projection_dim": WIDTH,
    **IDS,
}


def _made(kind: str, options: Mapping[str, Any], model_class: str) -> nn.Module:
    """Build a model by the class's name; with an automatic class, by the configuration's kind."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    found = getattr(transformers, model_class)
    model = found.from_config(config, **IN_TURN) if model_class.startswith("Auto") else found(config)
    assert isinstance(model, nn.Module)
    return model


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
