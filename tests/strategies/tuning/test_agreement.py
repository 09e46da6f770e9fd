"""The best plans of a search compile, and take in the simulator what the search says."""

import pytest

import quintsched as qs
from quintsched.strategies.prediction.simulated_strategy import simulated_step_s
from quintsched.strategies.prediction.strategy_plans import plan_of


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fixed"),
    [
        ("gpt3-175b", 64, 64, {"recompute": "full", "tp": 8, "cp": 1}),
        ("mpt-1b", 16, 64, {"pp": (2, 4), "recompute": "none", "zero": (0, 1)}),
        ("mpt-1b", 8, 32, {"schedule": "zbv", "recompute": "none", "pp": (2, 4)}),
    ],
)
def test_the_best_five_take_what_is_said(model, gpus, batch, fixed):
    found = qs.tune(
        qs.find_model(model), qs.find_hardware("a100-80gb"), gpus, batch, 2048, fixed=fixed, top=5, front=False
    )
    assert found.best
    for one in found.best:
        plan_of(found.model, one.strategy).check("blocking").raise_if_unsound()
        predicted = qs.predict(found.model, found.hardware, one.strategy)
        assert (predicted.step_s, predicted.memory_bytes) == pytest.approx((one.step_s, one.memory_bytes))
        assert simulated_step_s(found.model, found.hardware, one.strategy) == pytest.approx(one.step_s, rel=0.01)
