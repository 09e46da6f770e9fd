"""Profiles of Galvatron (Llama-2 7B, as shipped) and Primus: their times are met; the shipped strategy is no better."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import quintsched as qs
from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware, work_s
from quintsched.strategies.profiles.read_profile import Measured, read_profile

SHIPPED = Path(__file__).parents[3] / "benchmarks" / "data" / "galvatron_llama2_7b.json"
MODEL = qs.find_model("llama-2-7b")
A100 = qs.find_hardware("a100-40gb").model_copy(update={"memory_gb": 36 * 1.024**3})
"""The GPU of the profile, with the memory that Galvatron's search was given."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("galvatron")
    for name, content in json.loads(SHIPPED.read_text(encoding="utf-8"))["files"].items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def profile(folder):
    return read_profile(folder, Measured(model=MODEL))


@pytest.fixture(scope="module")
def hardware(profile):
    return measured_hardware(A100, profile)


def test_measured_forwards_are_met_by_one_factor(profile, hardware):
    assert len(profile.steps) == 24
    assert hardware.efficiency == pytest.approx(1.0, abs=0.03), "as the GPU's own constant, which was fitted elsewhere"
    errors = []
    for step in profile.steps:
        work = work_s(step.model, hardware, step.strategy)
        errors.append((sum(work.values()) - work["communication"]) / step.seconds["block"] - 1)
    assert np.abs([e for e, step in zip(errors, profile.steps, strict=True) if step.strategy.batch >= 3]).mean() < 0.015
    assert hardware.measured.all_reduce[8].rates[-1] == pytest.approx(2**30 / 8.1409e-3)
    assert hardware.link_gbps > 170


def test_the_strategy_that_galvatron_ships_is_not_better(folder, hardware):
    shipped = json.loads((folder / "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json").read_text())
    recomputed = sum(map(int, shipped["checkpoint"].split(",")))
    batch = shipped["global_bsz"]
    theirs = qs.Strategy(gpus=8, dp=8, microbatch=batch // 8, batch=batch, seq=2048, zero=3, recompute=recomputed)
    found = qs.predict(MODEL, hardware, theirs)
    assert found.fits
    best = qs.tune(MODEL, hardware, 8, batch, 2048, top=1).best[0]
    assert best.step_s <= 0.9 * found.step_s


def test_measured_activations_are_met_and_taken(hardware):
    measured = hardware.measured
    assert [measured.kept[tp] for tp in (1, 2, 4, 8)] == pytest.approx([1.0, 1.06, 1.07, 1.07], abs=0.01)
    one = qs.Strategy(gpus=8, tp=2, dp=4, batch=16, seq=2048, zero=3, sequence_parallel=True)
    kept = A100.model_copy(update={"measured": measured})
    found, less = (qs.predict(MODEL, each, one).breakdown_bytes["activations_ffn"] for each in (kept, A100))
    assert found == pytest.approx(measured.kept[2] * less)


def test_broken_profiles_are_named(folder, tmp_path):
    folder = Path(shutil.copytree(folder, tmp_path / "broken"))
    with pytest.raises(qs.UsageError, match="say of which model"):
        read_profile(folder)
    layers, memory = (folder / f"{kind}_profiling_bf16_llama2-7b_all.json" for kind in ("computation", "memory"))
    for times, sizes, why in (
        ('{"layernum[2]_bsz8_seq2048": "slow"}', "{}", "a number above 0"),
        ('{"layernum[2]_bsz8_seq2048": 0}', "{}", "a number above 0"),
        (
            '{"layernum[2]_bsz8_seq2048": 80.0}',
            '{"layertype_0_sp": {"2048": {}}}',
            "/layertype_0_sp/2048: activations by",
        ),
        ("{}", "{}", "no times of layers"),
    ):
        layers.write_text(times)
        memory.write_text(sizes)
        with pytest.raises(qs.InputError, match=why):
            read_profile(folder, Measured(model=MODEL))


MIXTRAL, MI300X = qs.find_model("mixtral-8x7b"), qs.find_hardware("mi300x")
SLOWER = 1.25


@pytest.fixture
def content():
    """A file of two layers on a GPU that takes a quarter longer than the datasheet says, and exchanges tokens."""
    cut = MIXTRAL.model_copy(update={"layers": 2})
    work = work_s(cut, MI300X, qs.Strategy(gpus=1, batch=2, microbatch=2, seq=4096))
    each_ms = SLOWER * sum(work[kind] for kind in ("product", "attention", "pass")) * 1e3 / 2
    layer = {
        "type": "moe",
        "forward_time_ms": each_ms / 3 + 1.0,
        "backward_time_ms": each_ms * 2 / 3 + 2.0,
        "mlp": {"forward_time_ms": 1.0, "a2a_forward_time_ms": 1.0, "a2a_backward_time_ms": 2.0},
    }
    summary = {"num_layers": 2, "moe_pattern": [1, 1], "num_experts": 8, "micro_batch_size": 2, "sequence_length": 4096}
    return {
        "schema_version": 2,
        "metadata": {"benchmark_ep": 1, "bench_training_config_summary": summary},
        "profiling_results": {"0": layer, "1": layer},
        "memory_results": None,
    }


def test_measured_layers_make_a_gpu_slower(content, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(content), encoding="utf-8")
    found = read_profile(tmp_path / "bench.json", Measured(model=MIXTRAL))
    hardware = measured_hardware(MI300X, found)
    assert hardware.efficiency == pytest.approx(MI300X.efficiency / SLOWER, rel=0.015), "attention keeps its rate"
    assert hardware.memory_gbps == pytest.approx(MI300X.memory_gbps / SLOWER, rel=0.015)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda c: c["metadata"].pop("bench_training_config_summary"), qs.InputError, "schema 2"),
        (lambda c: c["profiling_results"].pop("1"), qs.InputError, "/profiling_results/1: the times"),
        (lambda c: c["profiling_results"]["0"].update(forward_time_ms="slow"), qs.InputError, "milliseconds"),
        (lambda c: _summary(c).update(tensor_model_parallel_size=8), qs.UsageError, "were cut"),
        (lambda c: _summary(c).update(recompute_granularity="full"), qs.UsageError, "were recomputed"),
        (lambda c: _summary(c).update(moe_pattern=[1, 0]), qs.InputError, "no such layers"),
    ],
)
def test_broken_files_are_named(content, tmp_path, change, error, says):
    change(content)
    (tmp_path / "bench.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(error, match=says):
        read_profile(tmp_path / "bench.json", Measured(model=MIXTRAL))


def _summary(content):
    return content["metadata"]["bench_training_config_summary"]
