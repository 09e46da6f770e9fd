"""The best plans of a search compile, and take in the simulator what the search says."""

import pytest

from quintsched.strategies.descriptions.library import find_hardware, find_model
from quintsched.strategies.prediction.simulated import agreement
from quintsched.strategies.prediction.strategy_plans import plan_of
from quintsched.strategies.tuning.tune import tune


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fixed"),
    [
        ("gpt3-175b", 64, 64, {"recompute": "full"}),
        ("mpt-1b", 16, 64, {"pp": (2, 4), "recompute": "none", "zero": (0, 1)}),
        ("mpt-1b", 8, 32, {"schedule": "zbv", "recompute": "none", "pp": (2, 4)}),
    ],
)
def test_the_best_five_take_what_is_said(model, gpus, batch, fixed):
    found = tune(find_model(model), find_hardware("a100-80gb"), gpus, batch, 2048, fixed=fixed, top=5, front=False)
    assert found.best
    for one in found.best:
        plan_of(found.model, one.strategy).check("blocking").raise_if_unsound()
        both = agreement(found.model, found.hardware, one.strategy)
        assert both.predicted_s == pytest.approx(one.step_s)
        assert abs(both.error) < 0.01
