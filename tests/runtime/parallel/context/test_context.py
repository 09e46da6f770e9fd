"""Sequences shared out over ranks: what is counted, what is cut along, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers import training
from ...toys import ids_task, tiny_gpt, train_on
from ..lively import LENGTH


class Shifted(nn.Module):
    """Embeds, and adds what a step brings along: per token, and per sample."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 10)

    def forward(self, ids, along, each, context=None):
        return self.tokens(ids) + along[..., None] + each[:, None, None]


def test_extras_are_cut_along_the_sequence_unless_they_are_one_number_per_sample() -> None:
    (ids, targets), sgd = ids_task(1, 4, LENGTH).batches[0], training.sgd
    along, each = torch.randn(4, LENGTH, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    given = [(ids, targets, {"along": along, "each": each})]
    training.check_equality(plan, [Shifted], cross_entropy_sum, sgd, given, microbatches=2)
    wrong = [(ids, targets, {"along": along[:, :8], "each": each})]
    with pytest.raises(qs.MisfitError, match=r"along of shape \(4, 8\) does not run along the sequence of 16"):
        training.train_ranks(plan, [Shifted], cross_entropy_sum, sgd, wrong, dtype=torch.float64)


def test_what_does_not_fit_is_refused() -> None:
    cut = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    both = qs.compile("seq-1f1b", mesh="pp=2,cp=2", microbatches=2, slices=2)
    for plan, length, blocks, words in (
        (cut, 10, tiny_gpt(10), r"\(4, 10\).* sequence that divides into 4 equal chunks, .* of cp=2"),
        (both, 8, tiny_gpt(8), "over cp, and seq-1f1b cuts it into 2 slices; a run does one or the other"),
        (cut, 16, tiny_gpt(12), "built for 12 positions; a sequence has 16"),
    ):
        with pytest.raises((qs.MisfitError, qs.UsageError), match=words):
            train_on(plan, ids_task(1, 4, length), blocks, dtype=torch.float64)
