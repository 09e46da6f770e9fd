"""Tied weights: an embedding and a head on different stages stay one weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine

from ..toys import ids_task, sgd, tiny_gpt, train_on, train_plainly

DEPTH = 4
TIED: Mapping[str, Sequence[str]] = {"embedding": ("0.tokens.weight", f"{DEPTH + 1}.head.weight")}


def test_plan_and_model_must_tie_the_same() -> None:
    blocks = tiny_gpt(6, depth=DEPTH, tied=True)
    untied = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    with pytest.raises(qs.MisfitError, match=r"compile the plan with --tied embedding=0,1"):
        train_on(untied, ids_task(1, 4, length=6), blocks, dtype=torch.float64, tied=TIED)
    tied = qs.compile("1f1b", mesh="pp=2", microbatches=2, tied={"embedding": (0, 1)})
    with pytest.raises(qs.MisfitError, match="tied weights lie on stages none"):
        train_on(tied, ids_task(1, 4, length=6), blocks, dtype=torch.float64)


def test_weights_that_are_not_there_or_differ_in_shape_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    blocks = [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 2)]
    for names, words in [
        (("0.weight", "7.weight"), "names begin with the number of a block"),
        (("0.weight", "1.scale"), "no weight of that name"),
        (("0.weight", "1.weight"), r"\(4, 4\) and \(2, 4\)"),
    ]:
        with pytest.raises(qs.MisfitError, match=words):
            Engine(plan, blocks, nn.functional.mse_loss, sgd, tied={"both": names})


@pytest.mark.parametrize("names", [("1.norm1.weight", "5.norm.weight"), ("5.norm.weight", "1.norm1.weight")])
def test_a_weight_inside_and_outside_of_what_is_shared_out_over_tp_is_refused(names: tuple[str, str]) -> None:
    plan, task, tied = qs.compile("1f1b", mesh="tp=2", microbatches=2), ids_task(1, 4, length=6), {"norm": names}
    alone = train_plainly(task, tiny_gpt(6), 2, dtype=torch.float64, tied={"norm": sorted(names)})
    found = train_on(plan, task, tiny_gpt(6), dtype=torch.float64, tied=tied)
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-12)
    with pytest.raises(qs.MisfitError, match="on stage 0, and sequence parallelism gives but one of them all tokens"):
        train_on(plan, task, tiny_gpt(6), dtype=torch.float64, tied=tied, sequence_parallel=True)
