"""`quintsched predict --profile`: operators and steps that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"
ON_L4 = ("predict", "--hardware", "l4", "--seq", "2048", "--dtype", "fp16")
TINY = '{"layers": 2, "hidden": 256, "heads": 4, "vocab": 1000, "seq": 128, "dropout": false}'
SLOW = (
    '{"tflops": {"fp32": 0.1}, "processors": 1, "memory_gb": 16, "memory_gbps": 20, "link_gbps": 1, "network_gbps": 1}'
)


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "model.json").write_text(TINY, encoding="utf-8")
    (tmp_path / "slow.json").write_text(SLOW, encoding="utf-8")
    files = ("--model", str(tmp_path / "model.json"), "--hardware", str(tmp_path / "slow.json"))
    return ("predict", *files, "--dtype", "fp32")


def test_operators_predict_another_pipeline(cli):
    flags = ("--model", "gpt-1.3b", "--pp", "2", "--batch", "32", "--recompute", "selective")
    found = cli(*ON_L4, *flags, "--profile", str(DATA / "aceso"), "--json").data
    assert found["step_s"] == pytest.approx(14.25, rel=0.1)
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"])
    lines = cli(*ON_L4, *flags, "--profile", str(DATA / "aceso")).out
    assert "pp communication" in lines


def test_a_trace_predicts_other_strategies(cli, tiny):
    trace = ("--profile", str(DATA / "kineto_cpu_step.json"))
    same = cli(*tiny, "--batch", "2", "--microbatch", "2", *trace, "--json").data
    assert 0.6 < same["step_s"] < 0.9
    other = cli(*tiny, "--batch", "8", "--pp", "2", *trace, "--profile-at", "pp=1,batch=2,microbatch=2", "--json").data
    assert 1.2 < other["step_s"] < 3


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("dp", "cannot read 'dp'"),
        ("db=1", "unknown key 'db'; did you mean 'dp'"),
        ("dp=x", "give a whole number"),
        ("batch=0", "batch"),
    ],
)
def test_nonsense_is_refused(refused, tiny, at, said):
    trace = ("--profile", str(DATA / "kineto_cpu_step.json"), "--profile-at", at)
    assert said in refused(2, *tiny, "--batch", "2", *trace)
