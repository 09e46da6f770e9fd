"""Sequences in slices: a causal transformer under seq-1f1b equals the same model in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quintsched as qs

from ..toys import ids_task, tiny_gpt, train_on


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
