"""Models and hardware by name, from files, and as mappings; every fault with its place."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import quintsched as qs
from quintsched.strategies.descriptions import presets_and_files as presets

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
    (SIZES | {"layers": 10**6}, "/layers: "),
    (SIZES | {"hidden": 2**40}, "/hidden: "),
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


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        *(({"memory_gb": absurd}, "/memory_gb: ") for absurd in (0, -5, float("inf"), float("nan"))),
        ({"tflops": {}}, "/tflops: Dictionary should have at least 1 item"),
        ({"network_gbps": 1e300}, "/network_gbps: Input should be at most 1e[+]15"),
        ({"measured": {"memory": CURVE | {"rates": [1e9]}}}, "/measured/memory: 2 sizes, but 1 rates"),
        ({"measured": {"link": CURVE | {"sizes": [1e6, 1e3]}}}, "/measured/link: sizes rise from above 0"),
        ({"measured": {"cores": 2, "link": CURVE, "link_work": CURVE}}, "/measured: with cores and link_work"),
        ({"measured": {"all_reduce": {0: CURVE}}}, "/measured/all_reduce/0/"),
        ({"measured": {"all_reduce_work": {2: CURVE}}}, "/measured: all_reduce_work is given for 2 ranks, but all_"),
    ],
)
def test_figures_of_hardware_that_cannot_be_used(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(qs.InputError, match=f"the hardware: {fault}"):
        presets.find_hardware({"like": "a100-80gb"} | changes)
