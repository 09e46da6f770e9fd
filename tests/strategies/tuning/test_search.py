"""The search finds what brute force finds, in spaces that hold each strategy once; and says why others lost."""

import random

import numpy as np
import pytest

import quintsched as qs
from quintsched.strategies.descriptions.strategy_text import strategy_mesh
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.explain_choice import binding_term, explain, misfit, terms
from quintsched.strategies.tuning.recommended_strategy import BAND, POOL, advice, complexity, recommended, rows
from quintsched.strategies.tuning.strategy_space import Space, make_space
from quintsched.strategies.tuning.tune import HEADROOM

from .problems import Problem, brute_force, groups, problem


def found(given: Problem, **how: object) -> list[tuple[float, float]]:
    sizes, fixed = (given.gpus, given.batch, given.seq), given.choices.model_dump()
    tuning = qs.tune(given.model, given.hardware, *sizes, fixed=fixed, headroom=0, **how)
    return [(one.step_s, one.memory_bytes) for one in tuning.best]


def agrees(seed: int) -> None:
    given = problem(seed)
    if not groups(given):
        with pytest.raises(qs.UsageError, match="can hold"):
            found(given)
        return
    wanted = [pytest.approx(one[:2], rel=1e-12) for one in brute_force(given, 4)]
    assert found(given, top=4, front=False) == wanted
    assert found(given, top=4, front=True) == wanted
    assert found(given, top=4, prune=False) == wanted
    space = make_space(given.model, given.gpus, given.batch, given.seq, given.choices)
    assert space.count() == sum(group.named.count(False) for group in groups(given))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(40))
def test_the_best_are_those_of_brute_force(seed):
    agrees(seed)


@pytest.mark.parametrize("seed", [114, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1000, 1004))])
def test_a_strategy_is_predicted_alike_alone_and_among_others(seed):
    given = problem(seed)
    among = [strategy for group in groups(given) for strategy in group.members]
    every = evaluate(given.model, given.hardware, Table.from_strategies(among), simulate=True)
    for row in random.Random(seed).sample(range(len(among)), min(60, len(among))):
        alone = evaluate(given.model, given.hardware, Table.from_strategies([among[row]]), simulate=True)
        assert alone.step_s[0] == pytest.approx(every.step_s[row], rel=1e-12)
        assert alone.memory_bytes[0] == every.memory_bytes[row]
        for unit in ("seconds", "bytes"):
            found, expected = getattr(alone, unit), getattr(every, unit)
            assert {name: found[name][0] for name in found} == pytest.approx(
                {name: expected[name][row] for name in found}
            )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 1000, 60))
def test_the_best_of_a_thousand_problems_are_those_of_brute_force(first):
    for seed in range(first, first + 60):
        agrees(seed)


MODEL = qs.Model(layers=4, hidden=256, heads=4)


def space(**choices: object) -> Space:
    return make_space(MODEL, 8, 8, 128, Choices.from_values(choices))


def test_an_axis_may_be_fixed_or_left_some_choices():
    made = space(tp=2, pp=(1, 4), recompute="full", microbatch=1)
    columns, _ = made.expand(np.arange(made.num_frames))
    strategies = [made.strategy(columns, row) for row in range(made.count())]
    assert {one.tp for one in strategies} == {2}
    assert {one.pp for one in strategies} == {1, 4}
    assert {one.recompute for one in strategies} == {"full"}
    assert {one.microbatch for one in strategies} == {1}


def test_counts_are_exact_beyond_the_numbers_of_a_machine():
    wide = make_space(qs.find_model("gpt-1t"), 512, 512, 2048, Choices(pp=64, tp=8, schedule=("1f1b",), zero=(0,)))
    leaves = int(wide.leaves.sum())
    assert wide.count() == leaves + 2 * wide.num_frames * (3**64 - 2 - 1)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"tpp": 2}, "no axis is called 'tpp'; did you mean 'tp'?"),
        ({"tp": 3}, "no mesh of 8 GPUs can hold"),
        ({"recompute": "some"}, "tune: recompute"),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
        ({"zero": ()}, "zero has no choice"),
    ],
)
def test_what_cannot_be_chosen_is_said(choices, said):
    with pytest.raises(qs.UsageError, match=said.replace("?", r"\?").replace("(", r"\(")):
        space(**choices)


EIGHT_LAYERS = qs.Model(layers=8, hidden=1024, heads=8, vocab=1000)
LARGE = qs.Hardware(tflops={"bf16": 300.0}, memory_gb=80, memory_gbps=2000, link_gbps=300, network_gbps=25)


def hardware(gigabytes: float) -> qs.Hardware:
    return LARGE.model_copy(update={"memory_gb": gigabytes, "reserved_gb": 0.1})


def strategy(**given: object) -> qs.Strategy:
    return qs.Strategy(**{"gpus": 8, "batch": 16, "seq": 512, **given})


@pytest.fixture(scope="module")
def tuning():
    return qs.tune(EIGHT_LAYERS, LARGE, 8, 16, 512, top=1)


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
    small = hardware(qs.predict(EIGHT_LAYERS, hardware(80), large).memory_bytes * 0.7 / 1e9)
    tuning = qs.tune(EIGHT_LAYERS, small, 8, 16, 512, fixed={"cp": 1, "schedule": "1f1b"}, top=1)
    found = explain(tuning, large)
    assert not found.prediction.fits
    assert "pipeline rank 0 would hold" in found.lines[1]
    assert binding_term(found.prediction)[0] in found.lines[1]
    assert qs.predict(EIGHT_LAYERS, small, found.change.strategy).fits
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
    tuning = qs.tune(EIGHT_LAYERS, small, gpus, 16, 512, fixed=fixed)
    assert not tuning.best
    found = misfit(tuning)
    assert found.lines[0].startswith("nothing fits")
    assert said in found.change.words
    assert qs.predict(EIGHT_LAYERS, small, found.change.strategy).fits


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
