"""Primus' benchmark files: times of layers, of which hardware has the rates."""

import json

import pytest

import quintsched as qs
from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware, work_s
from quintsched.strategies.profiles.read_profile import Measured, read_profile

MODEL, MI300X = qs.find_model("mixtral-8x7b"), qs.find_hardware("mi300x")
SLOWER = 1.25


@pytest.fixture
def content():
    """A file of two layers on a GPU that takes a quarter longer than the datasheet says, and exchanges tokens."""
    cut = MODEL.model_copy(update={"layers": 2})
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
    found = read_profile(tmp_path / "bench.json", Measured(model=MODEL))
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
        read_profile(tmp_path / "bench.json", Measured(model=MODEL))


def _summary(content):
    return content["metadata"]["bench_training_config_summary"]
