"""Steps measured as a whole: Kineto traces, our own traces, and the rates that predictions take from them."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware, work_s
from quintsched.strategies.profiles.kernels_in_torch_trace import from_trace
from quintsched.strategies.profiles.profile import MeasuredStep, Profile
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
    step = MeasuredStep(model=model, strategy=here, seconds=work_s(model, real, here))
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
