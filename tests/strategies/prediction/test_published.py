"""Predictions stay as near to published measurements as the benchmark promises, and are better than simple formulas."""

import json

import pytest

from benchmarks.fit_cost_model import DATA, fit_h100, layer_errors, step_errors
from benchmarks.prediction import LIMITS, ours, read_cases, roofline, score_of
from quintsched.strategies.descriptions.library import find_hardware
from quintsched.strategies.prediction.efficiency import CONSTANTS


def read(name):
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LIMITS)
def test_published_steps(name):
    cases = read_cases(read(name))
    found, simpler = ([predictor(case.row) for case in cases] for predictor in (ours, roofline))
    score = score_of(cases, found)
    assert score.error <= LIMITS[name]
    assert score.error < score_of(cases, simpler).error
    assert score.tau > 0.9
    assert not score.regret


@pytest.mark.parametrize("hardware", ["a100-80gb", "a100-40gb"])
def test_each_a100_by_itself(hardware):
    cases = [case for case in read_cases(read("mpt_a100")) if case.row.hardware.name == hardware]
    assert score_of(cases, [ours(case.row) for case in cases]).error <= LIMITS["mpt_a100"]


def test_table_5_and_the_layers_it_was_fitted_with():
    table = read("korthikanti")
    assert len(vars(CONSTANTS)) <= 6
    assert abs(step_errors(table["rows"], CONSTANTS)).max() < 0.03
    assert abs(layer_errors(table["layers_ms"], CONSTANTS)).max() < 0.03


def test_the_h100_has_its_one_constant_from_two_rows():
    assert len(read("mpt_h100")["fitted"]) == 2
    assert find_hardware("h100").efficiency == pytest.approx(fit_h100(), abs=2e-3)
