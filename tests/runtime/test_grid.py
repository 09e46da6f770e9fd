"""In process: every case of the grid equals one process, and its likes bit for bit."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import isnan
from random import Random
from typing import Any

import pytest
import torch

from quintsched.ir.instruction_set import Overlap
from quintsched.runtime.parallel.mesh_independent_dropout import Masks

from ..helpers.training import require_same_bits, train_alone
from .grid import Case, Trained, differences, require_equal, require_equality, train
from .grid_cases import AXES, CASES, COLUMNS, NAMED, PIPELINES, UNEVEN, can_be, draw, judge, settings_of
from .grid_models import EXPERTS, LAST_FIRST, OPTIMIZERS, TRAINING, blocks_of, ce_sum

QUICK = [case for case in CASES if case.world_size <= 4 and case.size("pp") <= 2]
"""Of these some are tried every day."""


trained = cache(train)


def require_equality_and_bits(case: Case) -> None:
    """Require the numbers of one process, and the bits of it, or of the plainest case, where additions are the same."""
    ranks, twin = trained(case), case.twin()
    require_equal(case, ranks)
    if case.adds_as_alone:
        require_same_bits(ranks, [case.alone()])
    elif twin is not None:
        require_same_bits(ranks, trained(twin))
    if case.overlap:
        assert len(case.plan.columns.rows_where(Overlap))
        for one, other in zip(ranks, trained(replace(case, overlap=False)), strict=True):
            assert (one.losses, one.norms) == (other.losses, other.norms)
            assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_cases_equal_one_process(case: Case) -> None:
    require_equality_and_bits(case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [*PIPELINES, *NAMED, *UNEVEN], ids=str)
def test_cases_with_names_equal_one_process(case: Case) -> None:
    require_equality_and_bits(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=str)
def test_cases_of_many_ranks_equal_one_process(case: Case) -> None:
    require_equality_and_bits(case)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(1, 201))
def test_cases_of_other_seeds_equal_one_process_or_are_refused(seed: int) -> None:
    case = draw(seed)
    verdict, words = judge(case)
    assert verdict in ("equal", "refused"), f"{words}\n{case}"


def test_experts_that_are_not_cut_over_tp_equal_one_process() -> None:
    case = Case("interleaved-1f1b", "ep=2,pp=2,tp=2", 2, "experts", chunks=2, sequence_parallel=True)
    require_equality(case, rules={"*.experts.*": "replicate"})


def test_another_order_of_additions_shows_in_the_bits() -> None:
    case = Case(LAST_FIRST, "pp=3", 4)
    assert not case.adds_as_alone
    with pytest.raises(AssertionError):
        require_same_bits(trained(case), [case.alone()])


def test_nothing_passes_for_equal_that_is_not_a_number() -> None:
    alone = Trained([1.0], {"w": torch.ones(2)}, [1.0])
    broken = Trained([1.0], {"w": torch.tensor([1.0, torch.nan])}, [1.0])
    found = differences([alone, broken], alone)
    assert isnan(found.pop("weights"))
    assert set(found.values()) == {0.0}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", EXPERTS)
def test_what_the_models_have_shows_in_what_they_learn(model: str) -> None:
    """Or a mesh that forgets it would pass."""
    case = Case("1f1b", "pp=1", 4, model)

    def loss(microbatches: int = 4, seed: int = 0, **changed: float) -> float:
        blocks = blocks_of(model, 2, 8, case.dtype, pads=False, **changed)
        how: dict[str, Any] = {"microbatches": microbatches, "tied": case.tied, "masks": Masks(seed)}
        return train_alone(blocks, ce_sum, OPTIMIZERS["sgd"], case.batches()[:2], **how).losses[1]

    expected = loss()
    for other in (loss(microbatches=1), loss(seed=1), loss(dropout=0.0), loss(balance=0.0), loss(z=0.0)):
        assert abs(other - expected) > 1e-6


def has(case: Case, column: int, entry: Any) -> bool:
    """Whether a case has an entry of a column."""
    if column in (1, 2):
        return entry == (case.mesh if column == 1 else case.model)
    told = {"schedule": entry[0], **entry[1]} if column == 0 else entry
    return all(getattr(case, name) == value for name, value in told.items())


def test_entries_of_two_columns_are_together_where_they_can_be() -> None:
    random, found = (
        Random(0),
        [[{c for c in CASES if has(c, k, e)} for e in column] for k, column in enumerate(COLUMNS)],
    )
    sizes = [len(column) for column in COLUMNS]
    for a, b in [two for two in combinations(range(len(COLUMNS)), 2) if two != (0, 1)]:
        for i, k in product(range(sizes[a]), range(sizes[b])):
            if not found[a][i] & found[b][k]:
                rows = [[*map(random.randrange, sizes)] for _ in range(20)]
                rows = [[i if c == a else k if c == b else e for c, e in enumerate(row)] for row in rows]
                assert not any(can_be(**settings_of(row)) for row in rows), (COLUMNS[a][i], COLUMNS[b][k])


def test_the_grid_has_all_schedules_and_axes_and_enough_of_its_cases_are_alike() -> None:
    assert {case.schedule for case in CASES} >= {*TRAINING}
    axes = {frozenset(axis for axis in AXES if case.size(axis) > 1) for case in CASES}
    assert axes == {frozenset(some) for count in range(6) for some in combinations(AXES, count)}
    assert len({str(case) for case in CASES}) == len(CASES)
    assert sum(case.adds_as_alone for case in PIPELINES) >= len(PIPELINES) // 2
    assert sum(case.twin() is not None for case in CASES[::15]) >= 5
