"""Models and hardware by name, from files and from Hugging Face; their parameters; every fault with its place."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import quintsched as qs
from quintsched.strategies.descriptions import parameters as counts
from quintsched.strategies.descriptions import presets_and_files as presets
from quintsched.strategies.descriptions.model import LayerKind
from quintsched.strategies.descriptions.presets_and_files import find_model, model_names
from tests.helpers.refusals import require_refusals

SIZES = {"layers": 2, "hidden": 64, "heads": 4}
MODELS = {"GPT3-175B": "gpt3-175b", "gpt3": "gpt3-175b", "LLaMA 3 8B": "llama-3-8b", "MT-NLG": "mt-nlg-530b"}
MODELS |= {"Mixtral_8x7B": "mixtral-8x7b"}


HARDWARE = {"A100-SXM-80GB": "a100-80gb", "A100": "a100-80gb", "a100_40gb": "a100-40gb"}


def test_names_are_forgiving() -> None:
    assert {name: presets.find_model(name).name for name in MODELS} == MODELS
    assert {name: presets.find_hardware(name).name for name in HARDWARE} == HARDWARE


def test_no_two_presets_have_a_name_in_common() -> None:
    for folder in ("models", "hardware"):
        names: Counter[str] = Counter()
        for path in (presets.PRESETS / folder).glob("*.yaml"):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            for name, own in content[folder].items():
                names.update({presets.plain(known) for known in (name, *own.get("aliases", ()))})
        assert names.most_common(1)[0][1] == 1


def test_every_figure_of_hardware_names_its_source() -> None:
    for name in presets.hardware_names():
        hardware = presets.find_hardware(name)
        assert {"tflops", "memory_gb", "memory_gbps", "link_gbps", "network_gbps"} <= set(hardware.sources), name


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    path.write_text(json.dumps(SIZES) if suffix == ".json" else yaml.safe_dump(SIZES), encoding="utf-8")
    assert presets.find_model(path) == presets.find_model(str(path)) == qs.Model(**SIZES)


UNKNOWN = [
    (presets.find_model, "gpt3-175", "unknown model 'gpt3-175'; did you mean 'gpt3-175b'"),
    (presets.find_model, "aceso-1_3b", "unknown model 'aceso-1_3b'"),  # not aceso-13b
    (presets.find_model, "./missing.yaml", "missing.yaml: cannot read the model: No such file"),
    (presets.find_model, "meta-llama/Llama-9-8B", r"unknown model 'meta-llama/Llama-9-8B'.*or give a file"),
    (presets.find_hardware, "h10", "unknown hardware 'h10'; did you mean 'h100'"),
]


def test_unknown_names() -> None:
    for find, what, fault in UNKNOWN:
        with pytest.raises(qs.UsageError, match=fault):
            find(what)


def test_cpu_has_to_be_measured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "quintsched").mkdir()
    with pytest.raises(qs.UsageError, match=r"has not been measured .* quintsched calibrate"):
        presets.find_hardware("cpu")
    measured = {"name": "cpu", "tflops": {"fp32": 0.1}, "memory_gb": 8, "memory_gbps": 20, "link_gbps": 4}
    presets.calibrated_file().write_text(json.dumps(measured | {"network_gbps": 1}))
    assert presets.find_hardware("CPU").tflops == {"fp32": 0.1}


BROKEN = [
    (SIZES | {"layers": -1}, "/layers: Input should be at least 1"),
    (SIZES | {"layers": True}, "/layers: "),
    (SIZES | {"hiden": 5}, "/hiden: unknown key"),
    ({"hidden": 64, "heads": 4}, "/layers: Field required"),
    (SIZES | {"heads": 5}, "hidden=64 does not divide into heads=5"),
    (SIZES | {"vocab": 0}, "vocab is 0"),
    (SIZES | {"experts": {"count": 2, "top_k": 3, "ffn": 8}}, "top_k=3 of 2 experts"),
    (SIZES | {"experts": {"count": 2, "top_k": 1}}, "/experts/ffn: Field required"),
    (SIZES | {"like": 3}, "/like: give the name"),
]


@pytest.mark.parametrize(("values", "fault"), BROKEN, ids=[fault for _, fault in BROKEN])
def test_broken_descriptions_say_where(tmp_path: Path, values: dict[str, Any], fault: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    for what in (values, path):
        with pytest.raises(qs.QuintschedError, match=fault) as raised:
            presets.find_model(what)
        if what is path and "unknown" not in fault:
            assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "suffix", "fault"),
    [
        ("layers: 2\nlayers: 3\n", ".yaml", "line 2, column 1: 'layers' is given twice"),
        ('{"layers": 2, "layers": 3}', ".json", "duplicate key 'layers'"),
        ("- 1\n", ".yaml", "/: the model is described by names and sizes, not by a list"),
        ("x" * (2**20 + 1), ".yaml", "more than the 1048576 that are read"),
    ],
)
def test_broken_files_say_where(tmp_path: Path, text: str, suffix: str, fault: str) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(qs.InputError, match=fault) as raised:
        presets.find_model(path)
    assert (str(raised.value).startswith(str(path)), str(raised.value).count(str(path))) == (True, 1)


CURVE = {"sizes": [1e3, 1e6], "rates": [1e9, 1e10]}


SHEET = {"name": "A100", "tflops_bf16": 312, "hbm_gb": 80, "hbm_gbps": 2039, "nvlink_gbps": 600, "ib_gbps": 200}
LIKE = {"like": "a100-80gb"}


@pytest.mark.parametrize(
    ("description", "fault"),
    [
        *((SHEET | {name: "fast"}, "/") for name in ("tflops_bf16", "nvlink_gbps", "ib_gbps")),
        *((LIKE | {"memory_gb": absurd}, "/memory_gb: ") for absurd in (0, -5, float("inf"), float("nan"))),
        (LIKE | {"tflops": {}}, "/tflops: Dictionary should have at least 1 item"),
        (LIKE | {"network_gbps": 1e300}, "/network_gbps: Input should be at most 1e[+]15"),
        (LIKE | {"measured": {"memory": CURVE | {"rates": [1e9]}}}, "/measured/memory: 2 sizes, but 1 rates"),
        (LIKE | {"measured": {"link": CURVE | {"sizes": [1e6, 1e3]}}}, "/measured/link: sizes rise from above 0"),
        (LIKE | {"measured": {"cores": 2, "link": CURVE, "link_work": CURVE}}, "/measured: with cores and link_work"),
        (LIKE | {"measured": {"all_reduce": {0: CURVE}}}, "/measured/all_reduce/0/"),
        (
            LIKE | {"measured": {"all_reduce_work": {2: CURVE}}},
            "/measured: all_reduce_work is given for 2 ranks, but all_",
        ),
    ],
)
def test_figures_of_hardware_that_cannot_be_used(description: dict[str, Any], fault: str) -> None:
    with pytest.raises(qs.InputError, match=f"the hardware: {fault}"):
        presets.find_hardware(description)


CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "huggingface_configs.json").read_text(encoding="utf-8")
)
"""The `config.json` of a checkpoint, by its preset."""


@pytest.mark.parametrize("preset", CONFIGS)
def test_a_config_is_its_preset(preset: str) -> None:
    expected, found = qs.find_model(preset), qs.find_model(CONFIGS[preset])
    assert counts.total(found) == counts.total(expected)
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
    assert counts.total(qs.find_model(CHECKPOINTS[name])) == COUNTS[name]


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
