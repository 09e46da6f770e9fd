"""System files of SimuMax as hardware."""

import json

import pytest

from benchmarks.prediction import DATA
from quintsched.errors import InputError
from quintsched.strategies.descriptions.presets_and_files import find_hardware
from quintsched.strategies.prediction.efficiency import shape_rate

SYSTEM = json.loads((DATA / "simumax_b200_system.json").read_text(encoding="utf-8"))


def test_rates_are_those_of_the_file():
    found = find_hardware(SYSTEM)
    assert (found.name, found.tflops["bf16"], found.gpus_per_node) == ("b200_bf16_ceperm", 2250, 8)
    shares = SYSTEM["accelerator"]["op"]["matmul"]["accurate_efficient_factor"]
    share = shares["b=1, m=4096, k=8192, n=10240, layout=TN, accumulate=False, out_dtype=bf16"]
    sizes = (1.0, 4096.0, 10240.0, 8192.0)
    assert shape_rate(found.measured.products, *sizes) == pytest.approx(share * 2250e12)
    near = (1.0, 4090.0, 10250.0, 8200.0)
    assert shape_rate(found.measured.products, *near) == shape_rate(found.measured.products, *sizes)
    assert found.measured.all_reduce.keys() == {2, 4, 8}
    assert max(found.measured.all_reduce[8].rates) < 900e9


def test_attention_counts_without_its_mask():
    found = find_hardware(SYSTEM)
    assert max(found.measured.attention["bf16"].rates) < 0.7 * 2250e12
    assert max(found.measured.attention_backward["bf16"].rates) < max(found.measured.attention["bf16"].rates)


def test_a_part_that_is_missing_is_named():
    without = {name: value for name, value in SYSTEM.items() if name != "networks"}
    with pytest.raises(InputError, match="a system file of SimuMax without 'networks'"):
        find_hardware(without)
