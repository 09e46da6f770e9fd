"""Another shape in every step: losses, weights and metrics are those of one process, on every schedule and mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.training import require_equal
from ..toys import CLASSES, sgd
from .changing import LONGEST, Shape, batches, small_gpt, train_alone, train_on

ONE = [
    Shape([(4, 8)]),
    Shape([(5, 16)]),
    Shape([(2, 4)]),
    Shape([(7, 8)], evaluates=True),
    Shape([(1, 12)]),
    Shape([(4, 8)]),
    Shape([(3, 8)], evaluates=True),
]
TWO = [
    Shape([(4, 8), (4, 8)]),
    Shape([(5, 16), (3, 4)]),
    Shape([(1, 4), (6, 8)]),
    Shape([(0, 4), (6, 8)]),
    Shape([(2, 8), (0, 4)], evaluates=True),
    Shape([(4, 8), (4, 8)]),
]

CASES: dict[str, dict[str, Any]] = {
    "zb-h1": {"mesh": "pp=2"},
    "1f1b": {"mesh": "pp=4"},
    "interleaved-1f1b": {"mesh": "pp=2", "chunks": 2},
    "zbv": {"mesh": "pp=2"},
    "dualpipe": {"mesh": "pp=2"},
    "dualpipe-v": {"mesh": "pp=2"},
    "seq-1f1b": {"mesh": "pp=2", "slices": 2},
    "gpipe": {"mesh": "pp=2", "recompute": 1},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
@pytest.mark.parametrize("name", CASES)
def test_steps_of_any_shape(name: str, rules: Rules) -> None:
    plan, blocks = qs.compile(name, microbatches=4, **CASES[name]), small_gpt()
    require_equal(train_on(plan, blocks, ONE, rules), train_alone(blocks, ONE))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_replicas_have_shapes_of_their_own(mesh: str, zero: int) -> None:
    plan, blocks = qs.compile("1f1b", mesh=mesh, microbatches=4, zero=zero), small_gpt()
    require_equal(train_on(plan, blocks, TWO), train_alone(blocks, TWO))


MESHES: dict[str, dict[str, Any]] = {
    "tp=2,pp=2": {},
    "cp=2,pp=2": {},
    "pp=2,tp=2": {"sequence_parallel": True},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_within_a_stage_follow(mesh: str) -> None:
    plan, blocks = qs.compile("zb-h1", mesh=mesh, microbatches=4), small_gpt()
    require_equal(train_on(plan, blocks, ONE, **MESHES[mesh]), train_alone(blocks, ONE))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [{"overlap": True}, {"offload": 3}], ids=str)
def test_overlapped_and_offloaded_units_too(more: dict[str, Any]) -> None:
    name, mesh = ("dualpipe-v", "pp=2,tp=2") if "overlap" in more else ("1f1b", "pp=4")
    plan, blocks = qs.compile(name, mesh=mesh, microbatches=6, **more), small_gpt()
    shapes = [Shape([(12, 8)]), Shape([(6, 8)]), Shape([(6, 4)]), *ONE]
    require_equal(train_on(plan, blocks, shapes), train_alone(blocks, shapes))


def test_replicas_that_share_experts_compute_units_without_samples() -> None:
    data = DataSpec(input_shape=(LONGEST,), num_classes=CLASSES)
    blocks = moe_gpt(data, MoEGPTOptions(hidden=8, depth=2, heads=2, experts=4, balance=0, z=0))
    plan = qs.compile("1f1b", mesh="pp=2,ep=2", microbatches=4)
    require_equal(train_on(plan, blocks, TWO), train_alone(blocks, TWO))


class Down(nn.Module):
    """Sends its input past the next blocks, among them the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(CLASSES, 8)

    def forward(self, ids: Tensor) -> Carry:
        found = self.inner(ids)
        return Carry(found, skip=found.square())


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.cumsum(1)).tanh()


class Up(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(super().forward(x) + skip)


@pytest.mark.parametrize("skip", [None, {"skip": (0, 2)}], ids=str)
def test_what_rides_along_changes_with_the_rest(skip: dict[str, tuple[int, ...]] | None) -> None:
    blocks = [Down, Middle, Up]
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=4, skip=skip)
    require_equal(train_on(plan, blocks, ONE, "nccl"), train_alone(blocks, ONE))


def test_buffers_are_as_long_as_the_largest_message_and_no_more() -> None:
    plan, lengths = qs.compile("gpipe", mesh="pp=2", microbatches=2), [8, 4, 16, 12, 8, 2, 6, 16]

    def run(transport: Transport) -> list[int]:
        engine = Engine(plan, small_gpt(), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        found = []
        for step, length in enumerate(lengths):
            ((inputs, targets),) = batches(Shape([(4, length)]), step)
            engine.step(inputs, targets)
            buffers = engine._runner.interpreters["train"].state.messages.buffers
            found.append(sum(buffer.untyped_storage().nbytes() for buffer in buffers.all()))
        return found

    for found in run_local(2, run, rules="nccl"):
        assert found == [found[0] * longest // 8 for longest in (8, 8, 16, 16, 16, 16, 16, 16)]


def test_a_batch_that_cannot_be_cut_is_refused_on_all_ranks_in_the_same_words() -> None:
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=2)

    def run(transport: Transport) -> str:
        engine = Engine(plan, small_gpt(), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        ((inputs, targets),) = batches(Shape([(4, 8)]), 0)
        engine.step(inputs, targets)
        with pytest.raises(qs.MisfitError) as refused:
            engine.step(inputs[:, :7], targets)
        assert torch.isfinite(engine.step(inputs, targets).loss)
        return str(refused.value)

    assert set(run_local(2, run)) == {"inputs of shape (2, 7) cannot be cut into 2 equal slices"}


def test_targets_of_other_samples_than_the_inputs_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    engine = Engine(plan, small_gpt(), cross_entropy_sum, sgd, dtype=torch.float64)
    ((inputs, targets),) = batches(Shape([(4, 8)]), 0)
    with pytest.raises(qs.MisfitError, match=r"targets of shape \(3, 8\) cannot be cut .*: there are 4 samples"):
        engine.step(inputs, targets[:3])
