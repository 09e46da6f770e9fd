"""In process, by NCCL's rules: every configuration of the matrix equals one process, and its likes bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest
import torch

import quintsched as qs

from ..helpers.training import require_same_bits
from .matrix import CASES, LAST_FIRST, Case
from .toys import Outcome, train_on, worst_difference


def of_every_day(cases: Iterable[Case], every: int) -> list[Case]:
    """Every k-th case, and the first of each schedule."""
    firsts = {case.schedule: case for case in reversed(list(cases))}
    return [case for number, case in enumerate(cases) if number % every == 0 or firsts[case.schedule] is case]


DAILY = of_every_day(CASES, 3)
BY_KIND = [
    pytest.param(
        case,
        id=str(case),
        marks=[
            pytest.mark.xdist_group(f"matrix {case.in_step} {case.model}"),
            *([] if case in DAILY else [pytest.mark.slow]),
        ],
    )
    for case in CASES
]
"""Cases that may be alike run in the same process, where each of them is trained once."""

IN_SINGLE = [
    pytest.param(case, id=str(case), marks=[] if number % 3 == 0 else pytest.mark.slow)
    for number, case in enumerate(CASES[::3])
]

TRAINING = {s.name for s in qs.all_schedules() if s.mode == "train"}
"""Schedules of the package, before other tests register theirs."""


@cache
def trained(case: Case) -> list[Outcome]:
    task = case.task(torch.float64)
    return train_on(case.plan, task, case.blocks, dtype=torch.float64, tied=case.tied, rules="nccl")


@cache
def first_of_its_like() -> dict[tuple[object, ...], Case]:
    return {case.sums: case for case in reversed(CASES)}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("case", BY_KIND)
def test_in_double_precision_by_the_rules_of_nccl(case: Case) -> None:
    outcomes, alone = trained(case), case.alone(torch.float64)
    assert worst_difference(outcomes, alone) <= 1e-12
    if case.adds_as_alone:
        require_same_bits(outcomes, [alone])
    else:
        require_same_bits(outcomes, trained(first_of_its_like()[case.sums]))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", IN_SINGLE)
def test_in_single_precision_with_clipped_gradients_in_many_pieces(case: Case) -> None:
    task = case.task(torch.float32)
    outcomes = train_on(case.plan, task, case.blocks, clip=0.5, bucket_mb=0.004, dtype=torch.float32, tied=case.tied)
    assert worst_difference(outcomes, case.alone(torch.float32, 0.5)) <= 1e-5


def test_another_order_of_additions_shows_in_the_bits() -> None:
    case = next(case for case in CASES if case.schedule is LAST_FIRST)
    assert not case.adds_as_alone
    with pytest.raises(AssertionError):
        require_same_bits(trained(case), [case.alone(torch.float64)])


def test_the_matrix_has_every_schedule_and_enough_of_its_cases_are_alike() -> None:
    assert {case.schedule for case in CASES} >= TRAINING
    assert len({str(case) for case in CASES}) == len(CASES) >= 90
    alike = [case for case in CASES if not case.adds_as_alone and first_of_its_like()[case.sums] is not case]
    assert len(alike) >= 12
    assert len([case for case in CASES if case.adds_as_alone]) >= 25
