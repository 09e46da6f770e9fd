"""Losses of several outputs, each a mean over things of its own, are those of the whole batch on any mesh."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, SumOfMeans
from quintsched.runtime.splitting.adapters.transformers_inputs_and_losses import pretraining_loss

from ...helpers.blocks import of_layers
from ...helpers.training import Step, require_equal, sgd, train_alone, train_ranks

IDS, SAMPLES, TOKENS = 7, 8, 5
RANDOM = torch.Generator().manual_seed(0)
INPUTS = torch.randint(IDS, (SAMPLES, TOKENS), generator=RANDOM)
LABELS = torch.where(torch.rand(SAMPLES, TOKENS, generator=RANDOM) < 0.6, -100, INPUTS)
LABELS[0] = -100
PAIRS = torch.randint(2, (SAMPLES,), generator=RANDOM)


Heads = of_layers(
    "Heads",
    lambda: {"tokens": nn.Linear(6, IDS), "pairs": nn.Linear(6, 2)},
    lambda self, x: {"prediction_logits": self.tokens(x), "seq_relationship_logits": self.pairs(x[:, 0])},
)
"""As that of BertForPreTraining: what stands behind masked tokens, and whether two sentences follow each other."""
BLOCKS = [lambda: nn.Embedding(IDS, 6), Heads]
TARGETS = {"labels": LABELS, "next_sentence_label": PAIRS}


def plain_loss(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    of_tokens = nn.functional.cross_entropy(output["prediction_logits"].flatten(0, 1), targets["labels"].flatten())
    return of_tokens + nn.functional.cross_entropy(output["seq_relationship_logits"], targets["next_sentence_label"])


@pytest.mark.parametrize(("mesh", "count", "sizes"), [("dp=1", 8, [8]), ("dp=2,pp=2", 2, [5, 3])])
def test_masked_tokens_and_pairs_are_those_of_the_whole_batch(mesh: str, count: int, sizes: list[int]) -> None:
    plan, loss_fn = qs.compile("1f1b", mesh=mesh, microbatches=count), pretraining_loss("next_sentence_label")
    shares = zip(INPUTS.split(sizes), LABELS.split(sizes), PAIRS.split(sizes), strict=True)
    replicas = [(ids, {"labels": labels, "next_sentence_label": pairs}) for ids, labels, pairs in shares]
    steps, alone = ([Step(some, learns=False), Step(some)] for some in (replicas, [(INPUTS, TARGETS)]))
    found = train_ranks(plan, BLOCKS, loss_fn, sgd, steps, dtype=torch.float64)
    require_equal(found, train_alone(BLOCKS, plain_loss, sgd, alone))


def engine_of(loss_fn: Any) -> Engine:
    return Engine(qs.compile("1f1b", mesh="pp=1", microbatches=2), BLOCKS, loss_fn, sgd, dtype=torch.float64)


def test_the_same_as_one_number_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(qs.MisfitError, match="SumOfMeans"):
        engine_of(plain_loss).step(INPUTS, TARGETS)


def test_terms_are_sums() -> None:
    with pytest.raises(qs.MisfitError, match="term 0 of its SumOfMeans is no sum"):
        engine_of(SumOfMeans((plain_loss, lambda targets: len(targets["labels"])))).step(INPUTS, TARGETS)
    mean = SumOfMeans((lambda output, _: output["seq_relationship_logits"].square().sum(1).mean(), lambda _: 1))
    with pytest.raises(qs.MisfitError, match="is a mean of what it is of each"):
        engine_of(mean).step(INPUTS, TARGETS)
    with pytest.raises(qs.UsageError, match="pairs of functions"):
        SumOfMeans(plain_loss)


def test_gradients_of_several_batches_are_not_added_up() -> None:
    with pytest.raises(qs.UsageError, match="in one step"):
        engine_of(pretraining_loss("next_sentence_label")).step(INPUTS, TARGETS, last=False)
