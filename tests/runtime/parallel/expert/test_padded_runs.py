"""Mixtures that pad train as those do that count their rows, on every mesh and schedule, in steps of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, MoE
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.parallel.expert import moe
from quintsched.runtime.parallel.expert.router import Dispatch, counted
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers.training import require_equal
from ...step_setup import changing
from ...step_setup.changing import Shape
from ...toys import ids_task, sgd, train_on
from ..lively import LLAMA
from .mixtures import LENGTH, moe_blocks

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("zb-h1", "pp=2,ep=2", {}, {}, {"shared_experts": 1}),
    ("zb-h1", "ep=2,tp=2", {"recompute": 1}, {"sequence_parallel": True}, LLAMA | {"shared_experts": 2}),
    ("1f1b", "cp=2,ep=2", {"recompute": 2}, {}, {}),
    ("interleaved-1f1b", "ep=2,pp=2", {"chunks": 2, "recompute": 1}, {}, {"top_k": 1, "balance": 0.3}),
    ("dualpipe-v", "pp=2,ep=2", {"overlap": True}, {}, {}),
    ("1f1b", "dp=2,ep=2", {"zero": 3}, {}, {}),
    ("seq-1f1b", "pp=2,ep=2", {"slices": 2}, {}, {"balance": 0.0}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_padding_changes_no_run(number: int) -> None:
    """Mixtures that drop rows: the grid has those that drop none."""
    schedule, mesh, shape, more, options = CASES[number]
    plan = qs.compile(schedule, mesh=mesh, microbatches=4 if schedule == "dualpipe-v" else 2, **shape)
    how: dict[str, Any] = {"clip": 1.0, "bucket_mb": 0.01, "rules": "nccl", "dtype": torch.float64} | more
    runs = []
    for pads in (True, False):
        blocks = moe_blocks(capacity_factor=(0.5, 1.25)[number % 2], pad_to_capacity=pads, **options)
        runs.append(train_on(plan, ids_task(2, 8, LENGTH), blocks, **how))
    for padded, counted_rows in zip(*runs, strict=True):
        require_equal([padded], counted_rows)
        assert padded.norms == pytest.approx(counted_rows.norms, rel=1e-12)


# Steps of any shape.

UNEVEN = [
    Shape([(12, 8), (12, 8)]),
    Shape([(11, 8), (11, 8)]),
    Shape([(12, 8), (7, 8)]),
    Shape([(6, 8), (3, 16)]),
    Shape([(6, 8), (0, 8)], evaluates=True),
    Shape([(1, 8), (0, 8)]),
    Shape([(0, 8), (5, 4)]),
    Shape([(12, 8), (12, 8)]),
    Shape([(1, 8), (1, 8)]),
    Shape([(12, 8), (12, 8)]),
    Shape([(12, 8), (5, 8)]),
    Shape([(12, 8), (12, 8)]),
]
"""Of two replicas: uneven microbatches, other numbers of samples, other lengths, none; the first of them may not see
from its own samples that something has changed."""


def padding(factor: float = 0.75, *, pads: bool = True) -> Blocks:
    return moe_blocks(16, capacity_factor=factor, pad_to_capacity=pads)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["ep=2", "pp=2,ep=2"])
def test_replicas_of_other_shapes_have_the_same_numbers(mesh: str) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4)
    padded, plain = (changing.train_on(plan, padding(pads=pads), UNEVEN) for pads in (True, False))
    for one, other in zip(padded, plain, strict=True):
        require_equal([one], other)


def test_rows_are_counted_in_the_steps_that_want_it_and_in_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def noting(*given: Any) -> Dispatch:
        counts.append(1)
        return counted(*given)

    monkeypatch.setattr(moe, "counted", noting)
    plan = qs.compile("1f1b", mesh="ep=2", microbatches=4)

    def run(transport: Transport) -> tuple[list[bool], list[bool]]:
        engine = Engine(plan, padding(), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        layer = next(module for module in engine.stages[0].modules() if isinstance(module, MoE))
        has_counted, waits = [], []
        for step, shape in enumerate(UNEVEN):
            transport.world_group().all_reduce(torch.zeros(1)).wait()
            counts.clear()
            inputs, targets = changing.batches(shape, step)[engine.replica]
            (engine.evaluate if shape.evaluates else engine.step)(inputs, targets)
            transport.world_group().all_reduce(torch.zeros(1)).wait()
            has_counted.append(bool(counts))
            waits.append(layer.waits_for_routing)
        return has_counted, waits

    differ = [first != second for first, second in (shape.replicas for shape in UNEVEN)]
    assert run_local(2, run, rules="nccl") == [(differ, differ)] * 2


def test_overlapped_computations_refuse_other_shapes() -> None:
    plan = qs.compile("dualpipe-v", mesh="pp=2,ep=2", microbatches=4, overlap=True)
    shapes = [Shape([(8, 8), (8, 8)])] * 3
    alike, one = changing.train_on(plan, padding(), shapes), changing.train_on(plan, padding(pads=False), shapes)
    for found, expected in zip(alike, one, strict=True):
        require_equal([found], expected)
    with pytest.raises(qs.MisfitError, match="give all replicas as many samples of the same length, or compile the pl"):
        changing.train_on(plan, padding(), [*shapes, Shape([(8, 8), (4, 8)])])


class Counting(nn.Module):
    """A block whose meta device cannot say what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.sum().item()


def test_shapes_that_depend_on_data_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="ep=2", microbatches=1)
    first, *others = padding()
    with pytest.raises(qs.MisfitError, match="blocks depend on data; take pad_to_capacity=False"):
        changing.train_on(plan, [first, Counting, *others], UNEVEN[:1])
    changing.train_on(plan, [first, Counting, *padding(pads=False)[1:]], UNEVEN[:1])
