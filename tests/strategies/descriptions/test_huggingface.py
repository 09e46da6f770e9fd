"""The `config.json` of transformers: the same sizes as the presets, and what is not read is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quintsched.errors import InputError
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.parameters import total
from quintsched.strategies.descriptions.presets_and_files import find_model

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MIXTRAL = LLAMA_3_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
QWEN3_NEXT = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
    "vocab_size": 65024,
}
COMMAND_R = {
    "model_type": "cohere",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
GPT2 = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BLOOM = {
    "model_type": "bloom",
    "n_embed": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "seq_length": 2048,
    "vocab_size": 250880,
    "attention_dropout": 0.0,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "id2label": {str(number): "x" for number in range(1000)},
}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA_3_8B, "llama-3-8b"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (QWEN3_NEXT, "qwen3-next-80b-a3b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (GPT_OSS, "gpt-oss-120b"),
        (FALCON, "falcon-40b"),
        (COMMAND_R, "command-r"),
        (GPT2, "gpt2"),
        (BLOOM, "bloom-176b"),
        (VIT, "vit-b-16"),
    ],
)
def test_a_config_is_its_preset(config: dict[str, Any], preset: str) -> None:
    expected, found = find_model(preset), find_model(config)
    assert total(found) == total(expected)
    keep = (
        "layers",
        "hidden",
        "heads",
        "experts",
        "latent",
        "delta",
        "images",
        "tied",
        "activation",
        "positions",
        "dropout",
    )
    assert found.model_dump(include=set(keep)) == expected.model_dump(include=set(keep))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "vocab_size": 50272}
            | {"num_hidden_layers": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768},
            125_239_296,
        ),
        (
            {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}
            | {"expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "attn_config": {"alibi": True}},
            6_649_286_656,
        ),
        (
            {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
            | {"num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936},
            494_032_768,
        ),
        (
            {"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16}
            | {"num_hidden_layers": 28, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000},
            8_537_680_896,
        ),
        (
            {"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
            | {"num_hidden_layers": 6, "vocab_size": 50304, "tie_word_embeddings": False},
            70_426_624,
        ),
    ],
    ids=["opt-125m", "mpt-7b", "qwen2-0.5b", "gemma-7b", "pythia-70m"],
)
def test_counts_of_published_checkpoints(config: dict[str, Any], parameters: int) -> None:
    assert total(find_model(config)) == parameters


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"model_type": "lama"}, "/model_type: no description of 'lama' is read; did you mean 'llama'"),
        (LLAMA_3_8B | {"num_hidden_layers": -2}, "/layers: "),
        ({key: value for key, value in LLAMA_3_8B.items() if key != "hidden_size"}, "/hidden: Field required"),
        (QWEN3_MOE | {"mlp_only_layers": [3]}, "/mlp_only_layers"),
        ({"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512}, "/word_embed_proj_dim"),
    ],
)
def test_what_is_not_described_is_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        find_model(config)


def test_dropout_is_what_the_config_says() -> None:
    assert find_model(GPT2).dropout
    assert not find_model(GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0}).dropout
    model: Model = find_model({key: value for key, value in GPT2.items() if key != "attn_pdrop"})
    assert model.dropout
