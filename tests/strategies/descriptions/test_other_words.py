"""Models and hardware in the words of others: Megatron's options, transformers' sizes, the figures of datasheets."""

import pytest

import quintsched as qs
from tests.helpers.refusals import require_refusals

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
