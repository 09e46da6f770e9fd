"""Predictions stay as near to published measurements as the benchmark promises, and are better than simple formulas."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit_cost_model import DATA, OWN, fit_efficiency, layer_errors, read_rows, step_errors
from benchmarks.prediction import LIMITS, MEMORY_LIMITS, memory_errors, ours, read_cases, roofline, score_of
from quintsched.strategies.descriptions.hardware import Constants
from quintsched.strategies.descriptions.presets_and_files import find_hardware, hardware_names
from quintsched.strategies.descriptions.strategy_text import strategy_name
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.published_recipes import RECIPES
from quintsched.strategies.tuning.strategy_space import FIXED, MESH, make_space


def read(name):
    path = RECIPES if name == "recipes" else DATA / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LIMITS)
def test_published_steps(name):
    cases = read_cases(read(name))
    found, simpler = ([predictor(case.row) for case in cases] for predictor in (ours, roofline))
    score = score_of(cases, found)
    assert score.error <= LIMITS[name]
    assert score.error < score_of(cases, simpler).error
    mixed = np.random.default_rng(0).permutation(len(cases))
    permuted = [replace(case, measured_s=cases[other].measured_s) for case, other in zip(cases, mixed, strict=True)]
    assert score_of(permuted, found).error > 3 * score.error, "predictions tell the runs of a table apart"
    assert score.tau > 0.9
    assert not score.regret
    if name in MEMORY_LIMITS:
        assert np.abs(memory_errors(cases)).mean() <= MEMORY_LIMITS[name]


def test_a_system_file_of_simumax_describes_hardware():
    table = read("simumax_b200")
    found = find_hardware(DATA / "simumax_b200_system.json")
    measured = {**table["settings"], "hardware": {**found.model_dump(), "memory_gb": 191.5}}
    cases = read_cases({**table, "settings": measured})
    score = score_of(cases, [ours(case.row) for case in cases])
    assert score.error <= 0.056
    assert score.tau > 0.9


@pytest.mark.parametrize("hardware", ["a100-80gb", "a100-40gb"])
def test_each_a100_by_itself(hardware):
    cases = [case for case in read_cases(read("mpt_a100")) if case.row.hardware.name == hardware]
    assert score_of(cases, [ours(case.row) for case in cases]).error <= LIMITS["mpt_a100"]


def test_every_constant_has_a_source_and_every_table_its_place():
    protocol = read("protocol")
    presets = {f"{name}.efficiency": find_hardware(name) for name in hardware_names()}
    fitted = {name: one.sources["efficiency"] for name, one in presets.items() if one.efficiency != 1.0}
    own = {name for name, source in fitted.items() if not source.startswith("as ")}  # not those of another one
    known = {*Constants.model_fields, *own, "EXCHANGE", "LAUNCH_S"}
    assert protocol["constants"].keys() == known
    assert len(known) <= 10
    for name, source in protocol["constants"].items():
        kind, _, where = source.partition(": ")
        assert where, f"{name} has no source"
        assert kind != "fitted" or where in protocol["fitted_on"]
    tables = {path.stem for path in (*DATA.glob("*.json"), RECIPES)}
    assert {*protocol["fitted_on"], *protocol["tests"]} <= tables
    assert {*LIMITS, "recipes"} <= {*protocol["fitted_on"], *protocol["tests"]}


def test_published_recipes_fit_and_take_as_long_as_they_took():
    table = read("recipes")
    for row, case in zip(table["rows"], read_cases(table), strict=True):
        found = predict(case.row.model, case.row.hardware, case.row.strategy)
        assert found.fits
        assert abs(found.step_s / case.measured_s - 1) <= row["limit"], row["name"]


def test_published_recipes_are_strategies_of_the_search():
    for case in read_cases(read("recipes")):
        wanted, sizes = case.row.strategy, case.row.strategy
        open_ones = {name: getattr(wanted, name) for name in ("dtype", "zero_every", "recompute", *FIXED)}
        space = make_space(case.row.model, sizes.gpus, sizes.batch, sizes.seq, Choices.from_values(open_ones))
        schedule = space.choices.schedule.index(resolved(wanted).schedule)
        frame = [*(getattr(wanted, axis) for axis in MESH), schedule, resolved(wanted).chunks, wanted.microbatch]
        assert (space.frames == frame).all(axis=1).any(), strategy_name(wanted)
        assert [wanted.zero, wanted.zero_every if wanted.zero > 1 else 1] in space.zeros.tolist()


def test_table_5_and_the_layers_it_was_fitted_with():
    table = read("korthikanti")
    assert len(Constants.model_fields) <= 6
    assert abs(step_errors([table["settings"] | row for row in table["rows"]], Constants())).max() < 0.03
    assert abs(layer_errors(table["layers_ms"], Constants())).max() < 0.03


@pytest.mark.parametrize("name", OWN)
def test_a_gpu_has_its_one_constant_from_two_rows(name):
    _, named = read_rows(name)
    assert len(named) == 2
    assert find_hardware(named[0]["hardware"]).efficiency == pytest.approx(fit_efficiency(named), abs=2e-3)
