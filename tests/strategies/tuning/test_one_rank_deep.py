"""Without a pipeline: schedules and chunks that are asked for are all tried, in whatever order they are named."""

from itertools import permutations

import pytest

from quintsched.errors import UsageError
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.prediction.predict_strategy import predict
from quintsched.strategies.tuning.tune import tune

MODEL = {"layers": 6, "hidden": 512, "heads": 16, "vocab": 1000}
FIXED = {"pp": 1, "tp": 1, "cp": 1, "zero": 2, "sequence_parallel": False, "recompute": 1}


def test_the_order_of_schedules_does_not_matter():
    model, hardware = find_model(MODEL), find_hardware("l4")
    names = ("zbv", "bfs", "1f1b")
    found = [
        tune(model, hardware, 8, 16, 1024, fixed=FIXED | {"schedule": order, "chunks": (1, 2, 3)})
        for order in permutations(names)
    ]
    assert len({one.best[0].step_s for one in found}) == 1
    strategies = {(one.strategy.schedule, one.strategy.chunks) for one in found[0].best}
    assert {name for name, _ in strategies} == set(names)
    for one in found[0].best:
        assert predict(model, hardware, one.strategy).step_s == pytest.approx(one.step_s)


@pytest.mark.parametrize("choice", [{"microbatch": 3}, {"pp": 2, "schedule": "interleaved-1f1b", "chunks": 1}])
def test_the_choice_that_stands_in_the_way_is_named(choice):
    with pytest.raises(UsageError, match=r"without (schedule|chunks|microbatch) = .* there would be one"):
        tune(find_model(MODEL), find_hardware("l4"), 8, 16, 1024, fixed=choice)
