"""Stages through torch.compile give the numbers of those that are not, split backwards and recomputation included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.parallel.context.context_parallel import ContextMethod
from quintsched.runtime.train.summed_losses import cross_entropy_sum
from tests.compiling import TORCH_COMPILES

from ..toys import (
    Outcome,
    difference,
    ids_task,
    sgd,
    tiny_gpt,
    train_plainly,
    train_rank,
    worst_difference,
)

pytestmark = TORCH_COMPILES
slow = pytest.mark.slow


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x)))) * 0.5  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("zb-h1", 0),
        pytest.param("1f1b", 0, marks=slow),
        pytest.param("zbv", 0, marks=slow),
        pytest.param("1f1b", 1, marks=slow),
    ],
)
def test_compiled_stages_equal_plain_ones(schedule: str, recompute: int) -> None:
    plan = qs.compile(schedule, mesh="pp=2", microbatches=4, recompute=recompute)
    inputs, targets = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def outcome(compiled: bool) -> list[tuple[float, dict[str, Tensor], float | None]]:
        def run(transport: Transport) -> tuple[float, dict[str, Tensor], float | None]:
            engine = Engine(
                plan,
                [Mlp] * 4,
                nn.functional.mse_loss,
                sgd,
                dtype=torch.float64,
                compiled=compiled,
                transport=transport,
            )
            loss = [engine.step(inputs, targets).loss.item() for _ in range(3)][-1]
            engine.evaluate(inputs, targets)
            return loss, engine.full_weights(), engine.deferred_share

        return run_local(2, run, timeout_s=300)

    for (loss, weights, share), (expected_loss, expected, plain_share) in zip(
        outcome(True), outcome(False), strict=True
    ):
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        assert all(difference(weight, expected[name]) <= 1e-12 for name, weight in weights.items())
        assert share == plain_share
        assert share is None if schedule == "1f1b" else share is not None and share > 0.9


@slow
def test_stages_without_blocks_stay_as_they_are_beside_compiled_ones() -> None:
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=2, stages=[2, 0, 1])
    task, blocks = ids_task(2, 4, 8), tiny_gpt(8, depth=1)

    def run(transport: Transport) -> Outcome:
        more: dict[str, bool] = {"compiled": True}
        return train_rank(transport, plan, task, blocks, dtype=torch.float64, **more)

    expected = train_plainly(task, blocks, 2, dtype=torch.float64)
    assert worst_difference(run_local(3, run, timeout_s=300), expected) <= 1e-12


@slow
@pytest.mark.parametrize("context", ["ring", "gather", "ulysses"])
def test_compiled_stages_look_beyond_their_part_of_a_sequence(context: ContextMethod) -> None:
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    task, blocks = ids_task(2, 4, 8), tiny_gpt(8, depth=1)

    def run(transport: Transport) -> Outcome:
        engine = Engine(
            plan,
            blocks,
            cross_entropy_sum,
            sgd,
            dtype=torch.float64,
            compiled=True,
            context=context,
            transport=transport,
        )
        losses = [engine.step(*step).loss.item() for step in zip(task.inputs, task.targets, strict=True)]
        return Outcome(losses, engine.full_weights())

    expected = train_plainly(task, blocks, 2, dtype=torch.float64)
    assert worst_difference(run_local(2, run, timeout_s=300), expected) <= 1e-12


@slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_compile_issue_the_collectives_of_those_that_do_not(sequence_parallel: bool) -> None:
    """In one process they share what is compiled, and its limit: some ranks run some frames uncompiled."""
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=2)
    task, blocks = ids_task(2, 4, 8), tiny_gpt(8, depth=1)

    def run(transport: Transport) -> Outcome:
        more: dict[str, bool] = {"compiled": True, "sequence_parallel": sequence_parallel}
        return train_rank(transport, plan, task, blocks, dtype=torch.float64, **more)

    expected = train_plainly(task, blocks, 2, dtype=torch.float64)
    assert worst_difference(run_local(2, run, timeout_s=300), expected) <= 1e-12


class Noisy(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=slow)])
def test_compiled_stages_drop_the_same_and_are_compiled_once(schedule: str) -> None:
    plan = qs.compile(schedule, mesh="pp=1", microbatches=2)
    inputs, targets = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)

    def losses(compiled: bool) -> list[float]:
        engine = Engine(plan, [Noisy] * 2, nn.functional.mse_loss, sgd, dtype=torch.float64, compiled=compiled)
        first = [engine.step(inputs, targets).loss.item() for _ in range(2)]  # in one it is seen what they draw
        with torch.compiler.set_stance("fail_on_recompile" if compiled else "default"):
            return [*first, *(engine.step(inputs, targets).loss.item() for _ in range(2))]

    found = losses(True)
    assert len(set(found)) == 4
    assert found == pytest.approx(losses(False), abs=1e-12)
