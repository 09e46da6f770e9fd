"""Counts of weights: those that are published, and what a rank holds of them."""

import numpy as np
import pytest

from quintsched.strategies.descriptions import parameters as counts
from quintsched.strategies.descriptions.model import LayerKind
from quintsched.strategies.descriptions.presets_and_files import find_model, model_names

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bloom-176b": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "mistral-7b": 7_241_732_096,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "gpt-neox-20b": 20_554_567_680,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "command-r": 34_980_831_232,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "deepseek-v3": pytest.approx(671.03e9, abs=5e6),
}
"""Parameter counts of the published checkpoints."""

MPT = [
    *(("mpt-125m", 2048, 125_311_488), ("mpt-125m", 8192, 130_030_080), ("mpt-760m", 32768, 807_656_448)),
    *(("mpt-7b", 1024, 6_654_664_704), ("mpt-7b", 65536, 6_918_905_856)),
    *(("mpt-13b", 32768, 13_011_240_960), ("mpt-70b", 2048, 64_862_437_376)),
]
"""Parameters by the sequence that is trained on (mosaicml/llm-foundry@8c8dd48f, scripts/train/benchmarking)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert counts.total(find_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "seq", "parameters"), MPT)
def test_mpt_counts_have_a_row_per_position(name: str, seq: int, parameters: int) -> None:
    assert counts.total(find_model(name).model_copy(update={"seq": seq})) == parameters


@pytest.mark.parametrize(
    ("name", "billions", "error"),
    [("mixtral-8x7b", 12.88, 0.01), ("qwen3-235b-a22b", 22.19, 0.01), ("deepseek-v3", 37.5, 0.1)],
)
def test_active_parameters(name: str, billions: float, error: float) -> None:
    assert counts.active(find_model(name)) / 1e9 == pytest.approx(billions, abs=error)


@pytest.mark.parametrize("name", model_names())
def test_ranks_of_tp_and_ep_hold_what_there_is(name: str) -> None:
    """Whole weights are on each rank of tp, cut ones on all together: what is whole shows as the excess."""
    model = find_model(name)
    experts = model.experts.count if model.experts else 1
    tp = np.array([1, 2, 4])
    ep = np.array([1, experts, 1])
    for kind in {model.kinds[place] for place in model.layer_kinds}:
        weights = counts.block_weights(model, kind)
        if any(weight.is_cut and weight.units % 4 for weight in weights):
            continue
        held = counts.on_rank(weights, tp=tp, ep=ep)
        whole = sum(weight.numbers for weight in weights if not weight.is_cut)
        numbers = sum(weight.numbers for weight in weights)
        dense = numbers - (held.experts * tp * ep if kind.experts else 0) - whole
        assert (held.dense * tp == dense + whole * tp).all()


def test_vocabulary_is_padded_and_few_heads_of_keys_are_held_twice() -> None:
    gpt2, llama = find_model("gpt2"), find_model("llama-2-70b")
    assert counts.on_rank(counts.embedding_weights(gpt2)[:1], tp=2).dense == 25129 * 768
    assert counts.on_rank(counts.head_weights(gpt2)[-1:], tp=2).dense == 25129 * 768
    keys = [weight for weight in counts.block_weights(llama, LayerKind(False)) if "k_proj" in weight.name]
    assert counts.on_rank(keys, tp=16).dense == 128 * 8192
