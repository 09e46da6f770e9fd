"""Sequences shared out over ranks: what is counted, what is cut along, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ...toys import ids_task, sgd, share, tiny_gpt, tiny_vit, train_on
from ..lively import LENGTH, lively_gpt


def engine_on(transport: Transport, plan: qs.Plan, blocks: Blocks) -> Engine:
    return Engine(
        plan,
        blocks,
        cross_entropy_sum,
        sgd,
        metrics={"accuracy": correct_sum},
        dtype=torch.float64,
        transport=transport,
    )


def test_loss_metrics_and_evaluation_count_every_token_once() -> None:
    task, blocks = ids_task(2, 8, LENGTH), lively_gpt()

    def figures(mesh: str, microbatches: int) -> list[tuple[float, ...]]:
        def run(transport: Transport) -> list[float]:
            engine = engine_on(transport, qs.compile("1f1b", mesh=mesh, microbatches=microbatches), blocks)
            given = share(engine, task.inputs[0], task.targets[0])
            steps = [engine.evaluate(*given), engine.step(*given), engine.evaluate(*given)]
            return [x for s in steps for x in (s.loss.item(), s.metrics["accuracy"].item())]

        return [tuple(found) for found in run_local(qs.Mesh.parse(mesh).size, run)]

    expected = figures("pp=1", 4)[0]
    for found in figures("dp=2,cp=2", 2) + figures("cp=2,pp=2", 4):
        assert found == pytest.approx(expected, rel=1e-12)


class Shifted(nn.Module):
    """Embeds, and adds what a step brings along: per token, and per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 10)

    def forward(self, ids: Tensor, along: Tensor, each: Tensor, context: object = None) -> Tensor:
        shifted: Tensor = self.tokens(ids) + along[..., None] + each[:, None, None]
        return shifted


def test_extras_are_cut_along_the_sequence_unless_they_are_one_number_per_sample() -> None:
    task = ids_task(1, 4, LENGTH)
    along, each = torch.randn(4, LENGTH, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def loss_on(mesh: str, wrong: Tensor | None = None) -> float:
        def run(transport: Transport) -> float:
            engine = engine_on(transport, qs.compile("1f1b", mesh=mesh, microbatches=2), [Shifted])
            extra = along if wrong is None else wrong
            return engine.step(task.inputs[0], task.targets[0], along=extra, each=each).loss.item()

        return run_local(qs.Mesh.parse(mesh).size, run)[0]

    assert loss_on("cp=2") == pytest.approx(loss_on("pp=1"), rel=1e-12)
    with pytest.raises(qs.MisfitError, match=r"along of shape \(4, 8\) does not run along the sequence of 16"):
        loss_on("cp=2", along[:, :8])


def test_what_does_not_fit_is_refused() -> None:
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    with pytest.raises(qs.MisfitError, match="mesh cp=2 cuts sequences over cp, but no block takes `context`"):
        train_on(plan, ids_task(1, 4, 8), tiny_vit())
    with pytest.raises(qs.MisfitError, match=r"\(4, 10\).* sequence that divides into 4 equal chunks, .* of cp=2"):
        train_on(plan, ids_task(1, 4, 10), tiny_gpt(10), dtype=torch.float64)
    sliced = qs.compile("seq-1f1b", mesh="pp=2,cp=2", microbatches=2, slices=2)
    with pytest.raises(
        qs.UsageError, match=r"over cp, and seq-1f1b cuts it into 2 slices; a run does one or the other"
    ):
        train_on(sliced, ids_task(1, 4, 8), tiny_gpt(8))
    with pytest.raises(qs.MisfitError, match="built for 12 positions; a sequence has 16"):
        train_on(plan, ids_task(1, 4, 16), tiny_gpt(12), dtype=torch.float64)
