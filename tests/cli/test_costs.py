"""Costs files of every form, wherever a command takes one."""

import json

import pytest

import quintsched as qs
from tests.traces import write_trace

RICH = {
    "unit": "ms",
    "microbatches": [1, 2, 0.5, 1],
    "forward": {"stages": [4, 5], "microbatches": [1, 2.5, 0.5, 1]},
    "exchange": 0.5,
    "message": 8,
    "p2p": {
        "nodes": [0, 1],
        "within": {"bandwidth": 100},
        "across": {"latency": 0.5, "bandwidth": 8},
        "links": [{"source": 1, "destination": 0, "latency": 3}],
    },
}


@pytest.fixture
def rich(tmp_path) -> str:
    (tmp_path / "rich.json").write_text(json.dumps(RICH))
    return "rich.json"


def test_costs_for_other_microbatches_are_one_error(cli, refused, plan_file, rich):
    other = cli("compile", "-s", "1f1b", "--mesh", "pp=4", "-m", 8, "-o", "other.json")
    assert other.code == 0
    for command in (("simulate", "other.json"), ("show", "other.json"), ("compare", "1f1b", "--pp", 4, "-m", 8)):
        words = refused(1, *command, "--costs", rich)
        assert "costs: /microbatches has 4 values, but the plan has 8 microbatches" in words


def test_factors_from_a_trace(cli, refused, tmp_path, plan_file):
    lengths = (1.0, 2.0, 0.5, 0.5)
    costs = qs.Costs(unit="ms", forward=20.0, backward_input=20.0, backward_weight=20.0, microbatches=lengths)
    simulation = qs.Plan.load(plan_file).simulate(costs)
    write_trace(tmp_path / "traces", simulation)
    command = ("simulate", plan_file, "--costs", "from-trace", "traces", "--json")
    found = cli(*command, "--per-microbatch", "-o", "found.json").data
    assert found["makespan"] == pytest.approx(simulation.makespan, rel=0.001)
    assert cli(*command).data["makespan"] != pytest.approx(simulation.makespan, rel=0.01)
    assert qs.Costs.load(tmp_path / "found.json").forward.microbatches == pytest.approx(lengths, abs=0.001)
    words = refused(2, "simulate", plan_file, "--costs", "found.json", "--per-microbatch")
    assert "--per-microbatch goes with --costs from-trace only" in words
