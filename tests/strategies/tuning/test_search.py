"""The search finds what brute force finds; spaces hold what can be placed, once each, and know how much that is."""

import random

import numpy as np
import pytest

import quintsched as qs
from quintsched.strategies.descriptions.strategy_validity import check
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.strategy_space import PER_STAGE, Space, make_space

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


@pytest.mark.sampled(6)
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
        for terms in ("seconds", "bytes"):
            found, expected = getattr(alone, terms), getattr(every, terms)
            assert {name: found[name][0] for name in found} == pytest.approx(
                {name: expected[name][row] for name in found}
            )


@pytest.mark.slow
def test_the_best_of_a_thousand_problems_are_those_of_brute_force():
    for seed in range(40, 1000):
        agrees(seed)


MODEL = qs.Model(layers=4, hidden=256, heads=4)


def space(**choices: object) -> Space:
    return make_space(MODEL, 8, 8, 128, Choices.from_values(choices))


@pytest.mark.parametrize("seed", range(0, 36, 4))
def test_every_strategy_is_there_once_and_can_be_placed(seed):
    given = problem(seed)
    made = make_space(given.model, given.gpus, given.batch, given.seq, given.choices)
    columns, place = made.expand(np.arange(made.num_frames))
    one_each = [row for row in range(len(place)) if columns["recompute"][row] != PER_STAGE]
    found = [made.strategy(columns, row) for row in one_each]
    for strategy in found:
        check(given.model, given.hardware, strategy)
    assert len(set(found)) == len(found)
    assert set(found) == {one for group in groups(given) if len(group.members) == 1 for one in group.members}


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
        ({"tp": 0}, "tune: tp = 0"),
        ({"tp": 3}, "no mesh of 8 GPUs can hold"),
        ({"recompute": "some"}, "tune: recompute"),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
        ({"zero": ()}, "zero has no choice"),
    ],
)
def test_what_cannot_be_chosen_is_said(choices, said):
    with pytest.raises(qs.UsageError, match=said.replace("?", r"\?").replace("(", r"\(")):
        space(**choices)
