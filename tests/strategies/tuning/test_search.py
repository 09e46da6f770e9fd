"""The search finds what brute force finds."""

import random

import pytest

import quintsched as qs
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate
from quintsched.strategies.tuning.strategy_space import make_space

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


@pytest.mark.parametrize("seed", [114, *range(1000, 1004)])
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
