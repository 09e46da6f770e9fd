"""Logits that are cut over the vocabulary: the loss of whole logits, and nobody has them whole."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import ColumnParallelLinear, Engine, Transport, VocabParallelEmbedding, run_local
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ....helpers.training import require_equal, train_ranks
from ...toys import ids_task, sgd, tiny_gpt, train_plainly
from ...trials import on_ranks

PLAN = qs.compile("1f1b", mesh="tp=2", microbatches=2)


def cut_figures(logits: Tensor, targets: Tensor, ranks: int) -> list[tuple[float, float, float, Tensor]]:
    def run(transport: Transport) -> tuple[float, float, float, Tensor]:
        group = transport.make_group([tuple(range(ranks))])
        mine = logits.chunk(ranks, -1)[group.index].clone().requires_grad_()
        loss, weight = cross_entropy_sum(mine, targets, vocabulary=group)
        (loss * 3).backward()
        return loss.item(), weight.item(), correct_sum(mine.detach(), targets, vocabulary=group).item(), mine.grad

    return run_local(ranks, run)


@given(
    ranks=st.integers(1, 3),
    share_of_ids=st.integers(1, 4),
    shape=st.sampled_from([(5,), (2, 3), (1, 1, 4)]),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
@settings(max_examples=25, deadline=None)
def test_loss_hits_and_gradient_are_those_of_whole_logits(ranks, share_of_ids, shape, seed, scale):
    random = torch.Generator().manual_seed(seed)
    ids = ranks * share_of_ids
    logits = torch.randn(*shape, ids, generator=random, dtype=torch.float64) * scale
    targets = torch.randint(0, ids, shape, generator=random)
    targets[torch.rand(shape, generator=random) < 0.3] = -100
    whole = logits.clone().requires_grad_()
    loss, weight = cross_entropy_sum(whole, targets)
    (loss * 3).backward()
    for rank, figures in enumerate(cut_figures(logits, targets, ranks)):
        assert figures[0] == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
        assert figures[1:3] == (weight.item(), correct_sum(logits, targets).item())
        assert (figures[3] - whole.grad.chunk(ranks, -1)[rank]).abs().max() <= 1e-12


def test_of_equal_logits_the_first_id_is_predicted_on_all_ranks() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0, 2.0]])
    for ranks in (1, 2, 3):
        hits = [figures[2] for figures in cut_figures(logits, torch.tensor([int(logits.argmax())]), ranks)]
        assert hits == [1.0] * ranks


def test_short_logits_are_added_up_in_float32() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = torch.arange(64) % 8
    expected = nn.functional.cross_entropy(logits.float(), targets, reduction="sum").item()
    assert cut_figures(logits, targets, 2)[0][0] == pytest.approx(expected, rel=1e-6)


def test_a_target_that_is_no_id_is_refused_on_all_ranks() -> None:
    def run(transport: Transport) -> None:
        group = transport.make_group([(0, 1)])
        for wrong in (-1, 6, 99):
            with pytest.raises(RuntimeError, match="out of bounds"):
                cross_entropy_sum(torch.randn(2, 3), torch.tensor([1, wrong]), vocabulary=group)

    run_local(2, run)


def own_hits(logits: Tensor, targets: Tensor) -> Tensor:
    assert logits.shape[-1] == 10
    return correct_sum(logits, targets)


def own_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One's own: it knows of whole logits only."""
    assert logits.shape[-1] == 10
    return cross_entropy_sum(logits, targets)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss_fn", "hits", "is_whole"),
    [(cross_entropy_sum, correct_sum, False), (own_loss, correct_sum, True), (cross_entropy_sum, own_hits, True)],
)
def test_the_head_is_cut_and_its_logits_are_whole_for_who_needs_them(loss_fn: Any, hits: Any, is_whole: bool) -> None:
    task = ids_task(1, 4, 8)
    batch, expected = task.batches[0], train_plainly(task, tiny_gpt(), 2, dtype=torch.float64).losses

    def work(engine: Engine) -> None:
        stage = engine.stages[0].blocks
        embedding, head = stage["0"].get_submodule("tokens"), stage["5"].get_submodule("head")
        assert isinstance(embedding, VocabParallelEmbedding)
        assert isinstance(head, ColumnParallelLinear)
        assert embedding.weight.shape == head.weight.shape == (5, 16)
        assert head.gather_output is is_whole
        evaluated = engine.evaluate(*batch)
        assert [evaluated.loss.item()] == pytest.approx(expected, rel=1e-12)
        assert evaluated.metrics["hits"] == evaluated.metrics["ours"]
        assert [engine.step(*batch).loss.item()] == pytest.approx(expected, rel=1e-12)

    metrics = {"hits": hits, "ours": correct_sum}
    on_ranks(work, tiny_gpt(), loss_fn, mesh="tp=2", dtype=torch.float64, metrics=metrics)


def test_what_is_cut_by_vocabulary_before_the_last_block_is_whole_behind_it() -> None:
    task, blocks = ids_task(2, 4, 8), [*tiny_gpt()[:-1], lambda: nn.Sequential(nn.Linear(16, 16)), tiny_gpt()[-1]]

    how = {"dtype": torch.float64, "rules": {"5.0": "vocabulary"}}
    ranks = train_ranks(PLAN, blocks, cross_entropy_sum, sgd, task.batches, **how)
    require_equal(ranks, train_plainly(task, blocks, 2, dtype=torch.float64))
