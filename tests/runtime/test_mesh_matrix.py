"""Every mesh of five axes trains what one process trains: losses, gradients and their norms, weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import combinations, product
from math import isnan
from typing import Any

import pytest
import torch

from .mesh_matrix import (
    AXES,
    CASES,
    CLIP,
    IN_FLOAT32,
    MODELS,
    QUICK,
    QUICK_IN_FLOAT32,
    Case,
    Differences,
    Trained,
    options_of,
    task_of,
    train_alone,
    train_on,
    train_plainly,
)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
FEW, MANY = 3, 10
SCHEDULES = {"1f1b", "interleaved-1f1b", "zb-h1"}


def by_what_they_equal(cases: Iterable[Case]) -> list[Any]:
    """Cases that equal the same run in one process are tested in the same process, where it is done once."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"mesh matrix {case.alone}")) for case in cases
    ]


def require_equality(case: Case, steps: int, dtype: torch.dtype) -> None:
    alone = train_alone(*case.alone, steps, dtype)
    assert min(alone.norms) > CLIP
    found = Differences.of(train_on(case, steps, dtype), alone)
    assert all(value <= TOLERANCES[dtype] for value in asdict(found).values()), found


def axes_of(case: Case) -> frozenset[str]:
    return frozenset(axis for axis in AXES if case.size(axis) > 1)


def test_the_matrix_is_whole() -> None:
    found = {axes_of(case) for case in CASES}
    assert found >= {frozenset(axes) for count in (1, 2, 3, 4, 5) for axes in combinations(AXES, count)}
    assert len({case.mesh for case in CASES if len(axes_of(case)) == 3}) >= 12
    grid = {(*map(case.size, AXES), case.sequence_parallel) for case in CASES}
    assert grid >= {(*sizes, 1, both) for sizes in product((1, 2), repeat=4) for both in (False, True)}
    assert grid >= {(2, 2, 2, 2, 2, both) for both in (False, True)}
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("cases", [CASES, QUICK, IN_FLOAT32, QUICK_IN_FLOAT32], ids=len)
def test_every_part_of_it_has_everything(cases: Sequence[Case]) -> None:
    assert {case.schedule for case in cases} == SCHEDULES
    assert {axis for case in cases for axis in axes_of(case)} == set(AXES)
    assert {case.model for case in cases} == set(MODELS)
    assert {case.sequence_parallel for case in cases if case.size("tp") > 1} == {False, True}


def test_nothing_passes_for_equal_that_is_not_a_number() -> None:
    alone = Trained([1.0], [1.0], {"w": torch.ones(2)}, {"w": torch.ones(2)})
    broken = Trained([1.0], [1.0], {"w": torch.ones(2)}, {"w": torch.tensor([1.0, torch.nan])})
    found = Differences.of([alone, broken], alone)
    assert (found.losses, found.norms, found.gradients) == (0.0, 0.0, 0.0)
    assert isnan(found.weights)


def test_every_axis_meets_every_model_and_schedule() -> None:
    for axis in AXES:
        there = [case for case in CASES if case.size(axis) > 1]
        assert {case.model for case in there} == set(MODELS)
        assert {case.schedule for case in there} == SCHEDULES


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", MODELS)
def test_what_the_models_have_shows_in_what_they_learn(model: str) -> None:
    """Or a mesh that forgets it would pass."""
    options, task = options_of(model, torch.float64), task_of(2, 4, 8)

    def losses(microbatches: int = 4, seed: int = 0, **changed: float) -> list[float]:
        return train_plainly(model, options | changed, task, microbatches, torch.float64, seed).losses

    expected = losses()
    others = [losses(microbatches=1), losses(seed=1), losses(dropout=0.0), losses(balance=0.0), losses(z=0.0)]
    for other in others:
        assert abs(other[1] - expected[1]) > 1e-6


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", by_what_they_equal(QUICK))
def test_three_steps_equal_one_process(case: Case) -> None:
    require_equality(case, FEW, torch.float64)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", by_what_they_equal(QUICK_IN_FLOAT32))
def test_three_steps_in_single_precision(case: Case) -> None:
    require_equality(case, FEW, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_what_they_equal(CASES))
def test_ten_steps_equal_one_process(case: Case) -> None:
    require_equality(case, MANY, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_what_they_equal(IN_FLOAT32))
def test_ten_steps_in_single_precision(case: Case) -> None:
    require_equality(case, MANY, torch.float32)
