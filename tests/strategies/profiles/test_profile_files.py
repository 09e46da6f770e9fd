"""Profiles from steps, traces, Galvatron and Primus: their times are met, rates follow, and broken files are named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import quintsched as qs
from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware, work_s
from quintsched.strategies.profiles.kernels_in_torch_trace import from_trace
from quintsched.strategies.profiles.profile import Profile, ProfiledStep
from quintsched.strategies.profiles.profile_from_trace import read_trace
from quintsched.strategies.profiles.read_profile import Measured, read_profile
from tests.helpers.refusals import require_refusals
from tests.traces import write_trace

DATA = Path(__file__).parents[2] / "data"
TRACE = DATA / "kineto_cpu_step.json"
MODEL = qs.Model(name="tiny", layers=2, hidden=256, heads=4, vocab=1000, seq=128, dropout=False)
ON_ONE = qs.Strategy(gpus=1, batch=2, microbatch=2, seq=128, dtype="fp32")
SLOW = qs.Hardware(tflops={"fp32": 0.1}, memory_gb=16, memory_gbps=20, link_gbps=1, network_gbps=1)


def kernel(name: str, start: float, took: float, correlation: int = 0) -> list[dict[str, object]]:
    """A launch on the host, and what it started."""
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": start, "dur": 1,
         "args": {"correlation": correlation}},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start + 50, "dur": took,
         "args": {"correlation": correlation}},
    ]  # fmt: skip


def test_kernels_count_by_kind_and_step():
    events = [
        *kernel("ampere_fp16_s16816gemm_fp16_128x128", 0, 400, 1),
        *kernel("flash_fwd_kernel", 10, 100, 2),
        *kernel("vectorized_elementwise_kernel", 20, 60, 3),
        *kernel("ncclDevKernel_AllReduce_Sum_f16_RING_LL", 30, 80, 4),
        *kernel("vectorized_elementwise_kernel", 110, 40, 5),
        {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "pid": 1, "tid": 1, "ts": 100,
         "dur": 50},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 90},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "pid": 1, "tid": 1, "ts": 95, "dur": 90},
    ]  # fmt: skip
    found = from_trace({"traceEvents": events}, MODEL, ON_ONE, "a trace").steps[0].seconds
    assert found == pytest.approx(
        {"product": 200e-6, "attention": 50e-6, "pass": 30e-6, "communication": 40e-6, "optimizer": 20e-6}
    )


def test_predictions_repeat_what_was_measured():
    profile = read_profile(TRACE, Measured(MODEL, ON_ONE))
    hardware = measured_hardware(SLOW, profile)
    measured, expected = profile.steps[0].seconds, work_s(MODEL, hardware, ON_ONE)
    assert expected["product"] + expected["attention"] == pytest.approx(measured["product"] + measured["attention"])
    assert expected["pass"] == pytest.approx(measured["pass"], rel=0.01)


def test_a_slower_gpu_is_found_again():
    """A step as the model says it of a GPU 1.7 times slower: rates, and another strategy, follow."""
    model, hardware = qs.find_model("gpt-1.3b"), qs.find_hardware("a100-80gb")
    here = qs.Strategy(gpus=8, dp=1, tp=8, microbatch=4, batch=64, seq=2048)
    slower = {"efficiency": hardware.efficiency / 1.7, "memory_gbps": hardware.memory_gbps / 1.3}
    real = hardware.model_copy(update=slower)
    step = ProfiledStep(model=model, strategy=here, seconds=work_s(model, real, here))
    found = measured_hardware(hardware, Profile(steps=(step,)))
    elsewhere = qs.Strategy(gpus=64, dp=4, tp=4, pp=4, microbatch=4, batch=512, seq=2048)  # the GPU sets the pace
    assert qs.predict(model, found, elsewhere).step_s == pytest.approx(
        qs.predict(model, real, elsewhere).step_s, rel=0.03
    )
    assert qs.predict(model, hardware, elsewhere).step_s < 0.75 * qs.predict(model, real, elsewhere).step_s


def test_our_own_traces_are_profiles(tmp_path):
    plan = qs.compile("1f1b", mesh=qs.Mesh(pp=2), microbatches=4)
    costs = qs.Costs(unit="ms", forward=100, backward_input=100, backward_weight=100, p2p=10)
    write_trace(tmp_path, plan.simulate(costs))
    strategy = qs.Strategy(gpus=2, pp=2, batch=4, seq=128, dtype="fp32")
    profile = read_profile(tmp_path, Measured(MODEL, strategy, plan))
    assert profile.steps[0].seconds["block"] == pytest.approx(4 * 0.3, rel=0.02)
    found = measured_hardware(SLOW, profile)
    expected = work_s(MODEL, found, strategy)
    assert expected["product"] + expected["attention"] + expected["pass"] == pytest.approx(1.2, rel=0.05)


def table(columns: str, rows: str) -> str:
    return f'{{"profiles": {{"gpt_1B_mbs1_tp1_algo0": {{"columns": {columns}, "rows": {rows}}}}}}}'


def kernels(more: str) -> str:
    return f'{{"traceEvents": [{{"ph": "X", "cat": "kernel", {more}}}]}}'


BROKEN = [
    ("[]", "an object is needed"),
    ('{"traceEvents": []}', "no kernels and no operators"),
    ('{"traceEvents": {}}', "/traceEvents"),
    (kernels('"name": "gemm"'), "no time"),
    (kernels('"ts": 1' + "0" * 400), "no time"),
    (kernels('"ts": 1, "dur": -5'), "/seconds/pass: Input should be at least 0"),
    (table("[]", "true"), "/profiles/gpt_1B_mbs1_tp1_algo0: "),
    (table("1", "[]"), "columns are a list, and rows a list of"),
    (table("[]", '[{"a": 1}]'), "rows a list of lists"),
    (table("[]", "[[1, 1" + "0" * 400 + ", 1]]"), "not a table"),
    ('{"operators": [{"name": "a"}]}', "/operators/0/seq"),
    ('{"name": "nothing"}', "neither operators nor steps"),
    ('{"layer": ["a"], "steps": []}', "no times of a"),
    ('{"profiles": {"gpt_1B_mbs1_tp1_algo0": []}}', "columns and rows"),
    ('{"profiles": {}}', "no files of Aceso"),
    ("{", "not JSON"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN, ids=[f"{number} {said}" for number, (_, said) in enumerate(BROKEN)])
def test_broken_files_are_refused_with_the_place(tmp_path, text, said):
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(qs.InputError, match=said):
        read_profile(path, Measured(MODEL, ON_ONE))


def test_another_strategy_than_the_plans_is_refused(tmp_path):
    plan = qs.compile("1f1b", mesh=qs.Mesh(pp=2), microbatches=4)
    other = qs.Strategy(gpus=2, pp=2, batch=8, seq=128)
    require_refusals(
        ("strategy says", lambda: read_trace(tmp_path, plan, MODEL, ON_ONE)),
        ("4 microbatches", lambda: read_trace(tmp_path, plan, MODEL, other)),
        error=qs.MisfitError,
    )


SHIPPED = Path(__file__).parents[3] / "benchmarks" / "data" / "galvatron_llama2_7b.json"
LLAMA_7B = qs.find_model("llama-2-7b")
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
    return read_profile(folder, Measured(model=LLAMA_7B))


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
    found = qs.predict(LLAMA_7B, hardware, theirs)
    assert found.fits
    best = qs.tune(LLAMA_7B, hardware, 8, batch, 2048, top=1).best[0]
    assert best.step_s <= 0.9 * found.step_s


def test_measured_activations_are_met_and_taken(hardware):
    measured = hardware.measured
    assert [measured.kept[tp] for tp in (1, 2, 4, 8)] == pytest.approx([1.0, 1.06, 1.07, 1.07], abs=0.01)
    one = qs.Strategy(gpus=8, tp=2, dp=4, batch=16, seq=2048, zero=3, sequence_parallel=True)
    kept = A100.model_copy(update={"measured": measured})
    found, less = (qs.predict(LLAMA_7B, each, one).breakdown_bytes["activations_ffn"] for each in (kept, A100))
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
            read_profile(folder, Measured(model=LLAMA_7B))


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
