"""Sequences in slices: a causal transformer under seq-1f1b equals the same model in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quintsched as qs

from ..toys import ids_task, tiny_gpt, train_on, train_plainly, worst_difference


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "microbatches", "slices"), [("pp=1", 2, 2), ("pp=2", 2, 4), ("pp=4", 4, 2), ("dp=2,pp=2,tp=2", 2, 2)]
)
def test_slices_equal_one_process(mesh: str, microbatches: int, slices: int) -> None:
    task, blocks = ids_task(3, 8, length=8), tiny_gpt(length=8)
    plan = qs.compile("seq-1f1b", mesh=mesh, microbatches=microbatches, slices=slices)
    outcomes = train_on(plan, task, blocks, clip=1.0, dtype=torch.float64)
    expected = train_plainly(task, blocks, 4, clip=1.0, dtype=torch.float64)
    assert worst_difference(outcomes, expected) <= 1e-12


def test_a_length_that_does_not_divide_is_refused() -> None:
    task, blocks = ids_task(1, 8, length=7), tiny_gpt(length=7)
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=2)
    with pytest.raises(qs.MisfitError, match="cannot be cut into 2 equal slices"):
        train_on(plan, task, blocks, dtype=torch.float64)


def test_a_model_that_cannot_look_back_is_refused() -> None:
    task, blocks = ids_task(1, 8, length=8), [lambda: nn.Embedding(10, 10), lambda: nn.Linear(10, 10)]
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=2)
    with pytest.raises(qs.MisfitError, match="no block takes `past`"):
        train_on(plan, task, blocks, dtype=torch.float64)
