"""Explanations why a strategy lost or does not fit; the recommended strategy, rows of a table, memory kept free."""

import pytest

import quintsched as qs
from quintsched.strategies.descriptions.strategy_text import strategy_mesh
from quintsched.strategies.tuning.explain_choice import binding_term, explain, misfit, terms
from quintsched.strategies.tuning.recommended_strategy import BAND, POOL, advice, complexity, recommended, rows
from quintsched.strategies.tuning.tune import HEADROOM

MODEL = qs.Model(layers=8, hidden=1024, heads=8, vocab=1000)
LARGE = qs.Hardware(tflops={"bf16": 300.0}, memory_gb=80, memory_gbps=2000, link_gbps=300, network_gbps=25)


def hardware(gigabytes: float) -> qs.Hardware:
    return LARGE.model_copy(update={"memory_gb": gigabytes, "reserved_gb": 0.1})


def strategy(**given: object) -> qs.Strategy:
    return qs.Strategy(**{"gpus": 8, "batch": 16, "seq": 512, **given})


@pytest.fixture(scope="module")
def tuning():
    return qs.tune(MODEL, LARGE, 8, 16, 512, top=1)


def test_a_loser_is_slower_by_its_terms(tuning):
    found = explain(tuning, strategy(pp=8, schedule="gpipe", chunks=1))
    assert "slower than the best" in found.lines[1]
    assert any("pipeline bubble" in line for line in found.lines)
    assert found.winner is not None
    both = terms(found.prediction, found.winner)
    lost = found.prediction.step_s - found.winner.step_s
    assert sum(mine - theirs for _, mine, theirs in both) == pytest.approx(lost)


def test_what_does_not_fit_says_which_rank_and_what_would():
    large = strategy(pp=2, dp=4, microbatch=4)
    small = hardware(qs.predict(MODEL, hardware(80), large).memory_bytes * 0.7 / 1e9)
    tuning = qs.tune(MODEL, small, 8, 16, 512, fixed={"cp": 1, "schedule": "1f1b"}, top=1)
    found = explain(tuning, large)
    assert not found.prediction.fits
    assert "pipeline rank 0 would hold" in found.lines[1]
    assert binding_term(found.prediction)[0] in found.lines[1]
    assert found.change is not None
    assert qs.predict(MODEL, small, found.change.strategy).fits
    assert found.change.words in found.lines[2]


@pytest.mark.parametrize(
    ("fixed", "gpus", "said"),
    [
        ({}, 1, "gpus "),
        ({"zero": 0, "tp": 1, "pp": 1, "cp": 1, "microbatch": 1}, 8, "zero "),
        ({"recompute": "none", "microbatch": 16, "dp": 1}, 4, "instead of"),
    ],
)
def test_where_nothing_fits_the_smallest_change_is_said(fixed, gpus, said):
    small = hardware(0.9)
    tuning = qs.tune(MODEL, small, gpus, 16, 512, fixed=fixed)
    assert not tuning.best
    found = misfit(tuning)
    assert found.lines[0].startswith("nothing fits")
    assert found.change is not None
    assert said in found.change.words
    assert qs.predict(MODEL, small, found.change.strategy).fits


A100 = qs.find_hardware("a100-80gb")


@pytest.fixture(scope="module")
def ranked():
    return qs.tune(
        qs.find_model("mpt-7b"), A100, 16, 128, 2048, fixed={"recompute": ("none", "full")}, top=POOL, front=False
    )


def test_the_simplest_of_those_that_no_prediction_tells_apart_is_recommended(ranked):
    chosen, fastest = recommended(ranked), ranked.best[0]
    assert chosen.step_s <= fastest.step_s * (1 + BAND)
    near = [one for one in ranked.best if one.step_s <= fastest.step_s * (1 + BAND)]
    assert complexity(chosen.strategy, A100) == min(complexity(one.strategy, A100) for one in near)
    assert bool(list(advice(ranked))) == (chosen != fastest)


def test_a_mesh_has_one_row_and_no_row_is_beaten_in_time_and_memory(ranked):
    found = [row.candidate for row in rows(ranked.best)]
    meshes = [strategy_mesh(one.strategy) for one in found]
    assert found[0] == ranked.best[0]
    assert len(set(meshes)) == len(meshes)
    for one in found:
        assert not any(other.step_s < one.step_s and other.memory_bytes < one.memory_bytes for other in ranked.best)


def test_memory_stays_free(ranked):
    assert max(one.memory_bytes for one in ranked.best) <= (1 - HEADROOM) * A100.memory_gb * 1e9
    with pytest.raises(qs.UsageError, match="headroom is 1"):
        qs.tune(qs.find_model("mpt-7b"), A100, 8, 8, headroom=1)
