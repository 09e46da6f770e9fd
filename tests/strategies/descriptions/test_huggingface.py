"""Models and hardware in the words of others: transformers' `config.json`, Megatron's options, datasheets."""

import json
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.strategies.descriptions.parameters import total
from tests.helpers.refusals import require_refusals

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "huggingface_configs.json").read_text(encoding="utf-8")
)
"""The `config.json` of a checkpoint, by its preset."""


@pytest.mark.parametrize("preset", CONFIGS)
def test_a_config_is_its_preset(preset: str) -> None:
    expected, found = qs.find_model(preset), qs.find_model(CONFIGS[preset])
    assert total(found) == total(expected)
    keep = {"layers", "hidden", "heads", "experts", "latent", "delta", "images", "tied"}
    keep |= {"activation", "positions", "dropout"}
    assert found.model_dump(include=keep) == expected.model_dump(include=keep)


CHECKPOINTS = {
    "opt-125m": {"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12}
    | {"num_hidden_layers": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "vocab_size": 50272},
    "mpt-7b": {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}
    | {"expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "attn_config": {"alibi": True}},
    "qwen2-0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
    | {"num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936},
    "gemma-7b": {"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16}
    | {"num_hidden_layers": 28, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000},
    "pythia-70m": {"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    | {"num_hidden_layers": 6, "vocab_size": 50304, "tie_word_embeddings": False},
}

COUNTS = {"opt-125m": 125_239_296, "mpt-7b": 6_649_286_656, "qwen2-0.5b": 494_032_768, "gemma-7b": 8_537_680_896}
COUNTS |= {"pythia-70m": 70_426_624}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_counts_of_published_checkpoints(name: str) -> None:
    assert total(qs.find_model(CHECKPOINTS[name])) == COUNTS[name]


def without(name: str, preset: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIGS[preset].items() if key != name}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"model_type": "lama"}, "/model_type: no description of 'lama' is read; did you mean 'llama'"),
        (CONFIGS["llama-3-8b"] | {"num_hidden_layers": -2}, "/layers: "),
        (without("hidden_size", "llama-3-8b"), "/hidden: Field required"),
        (CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [3]}, "/mlp_only_layers"),
        ({"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512}, "/word_embed_proj_dim"),
    ],
)
def test_what_is_not_described_is_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(qs.InputError, match=fault):
        qs.find_model(config)


def test_dropout_is_what_the_config_says() -> None:
    assert qs.find_model(CONFIGS["gpt2"]).dropout
    assert not qs.find_model(CONFIGS["gpt2"] | {"attn_pdrop": 0.0, "resid_pdrop": 0}).dropout
    assert qs.find_model(without("attn_pdrop", "gpt2")).dropout


SHEET = {"name": "A100", "tflops_bf16": 312, "hbm_gb": 80, "hbm_gbps": 2039, "nvlink_gbps": 600, "ib_gbps": 200}


def test_megatrons_options_say_what_ours_say():
    sizes = {"num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "num-query-groups": 8}
    options = {"ffn-hidden-size": 14336, "padded-vocab-size": 128256, "seq-length": 8192}
    words = {"swiglu": True, "normalization": "RMSNorm", "untie-embeddings-and-output-weights": True}
    found = qs.find_model(sizes | options | words | {"add-bias-linear": False, "positions": "rope"})
    ours = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192}
    kinds = {"activation": "swiglu", "norm": "rmsnorm", "tied": False, "biases": False, "positions": "rope"}
    assert found == qs.find_model(ours | kinds)


def test_ties_in_the_words_of_transformers():
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    assert not qs.find_model(sizes | {"tie_word_embeddings": False}).tied


def test_a_datasheet_adds_both_directions_and_counts_the_network_in_bits():
    found = qs.find_hardware(SHEET)
    assert (found.link_gbps, found.network_gbps, found.memory_gb, found.memory_gbps) == (300, 25, 80, 2039)
    assert found.tflops["bf16"] == 312
    assert qs.find_hardware(SHEET | {"nvlink_gbps": 0, "pcie_gbps": 16}).link_gbps == 16


def test_what_is_neither_a_name_nor_a_mapping():
    for what in (5, [], None, True):
        require_refusals(("model: give a preset's name, a file or a mapping", lambda what=what: qs.find_model(what)))
        require_refusals(("hardware: give a preset's name", lambda what=what: qs.find_hardware(what)))


@pytest.mark.parametrize("words", [{"tflops_bf16": "fast"}, {"nvlink_gbps": "fast"}, {"ib_gbps": []}])
def test_figures_that_are_none(words):
    with pytest.raises(qs.InputError, match="the hardware: /"):
        qs.find_hardware(SHEET | words)
