"""The recommended strategy, the rows of a table, and the memory that stays free."""

import pytest

import quintsched as qs
from quintsched.strategies.descriptions.strategy_text import strategy_mesh
from quintsched.strategies.tuning.recommended_strategy import BAND, POOL, advice, complexity, recommended, rows
from quintsched.strategies.tuning.tune import HEADROOM

A100 = qs.find_hardware("a100-80gb")


@pytest.fixture(scope="module")
def tuning():
    return qs.tune(
        qs.find_model("mpt-7b"), A100, 16, 128, 2048, fixed={"recompute": ("none", "full")}, top=POOL, front=False
    )


def test_the_simplest_of_those_that_no_prediction_tells_apart_is_recommended(tuning):
    chosen, fastest = recommended(tuning), tuning.best[0]
    assert chosen.step_s <= fastest.step_s * (1 + BAND)
    near = [one for one in tuning.best if one.step_s <= fastest.step_s * (1 + BAND)]
    assert complexity(chosen.strategy, A100) == min(complexity(one.strategy, A100) for one in near)
    assert bool(list(advice(tuning))) == (chosen != fastest)


def test_a_mesh_has_one_row_and_no_row_is_beaten_in_time_and_memory(tuning):
    found = [row.candidate for row in rows(tuning.best)]
    meshes = [strategy_mesh(one.strategy) for one in found]
    assert found[0] == tuning.best[0]
    assert len(set(meshes)) == len(meshes)
    for one in found:
        assert not any(other.step_s < one.step_s and other.memory_bytes < one.memory_bytes for other in tuning.best)


def test_memory_stays_free(tuning):
    assert max(one.memory_bytes for one in tuning.best) <= (1 - HEADROOM) * A100.memory_gb * 1e9
    with pytest.raises(qs.UsageError, match="headroom is 1"):
        qs.tune(qs.find_model("mpt-7b"), A100, 8, 8, headroom=1)
