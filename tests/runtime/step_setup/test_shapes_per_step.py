"""Another shape in every step, and data that end at different times: the numbers of one process everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine, drained
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ...helpers.training import Outcome, require_equal
from ..toys import CLASSES, sgd
from .changing import LONGEST, Batch, Shape, batches, small_gpt, train_alone, train_on

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [{"overlap": True}, {"offload": 3}], ids=str)
def test_overlapped_and_offloaded_units_too(more: dict[str, Any]) -> None:
    name, mesh = ("dualpipe-v", "pp=2,tp=2") if "overlap" in more else ("1f1b", "pp=4")
    plan, blocks = qs.compile(name, mesh=mesh, microbatches=6, **more), small_gpt()
    shapes = [Shape([(12, 8)]), Shape([(6, 8)]), Shape([(6, 4)]), *ONE]
    require_equal(train_on(plan, blocks, shapes), train_alone(blocks, shapes))


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


STEPS = [Shape([(4, 8), (4, 8)]), Shape([(3, 8), (2, 4)]), Shape([(4, 8), (0, 8)]), Shape([(2, 16), (0, 8)])]


def loader(replica: int) -> list[Batch]:
    """Return a replica's batches: four of the first, two of the second."""
    found = [batches(shape, step)[replica] for step, shape in enumerate(STEPS)]
    return [batch for batch in found if len(batch[0])]


def engine_of(transport: Transport, plan: qs.Plan) -> Engine:
    return Engine(
        plan,
        small_gpt(),
        cross_entropy_sum,
        sgd,
        metrics={"accuracy": correct_sum},
        dtype=torch.float64,
        transport=transport,
    )


def outcome(results: list[Any], engine: Engine) -> Outcome:
    figures = [(result.weight.item(), result.metrics["accuracy"].item()) for result in results]
    return Outcome([result.loss.item() for result in results], engine.full_weights(), figures=figures)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_drained_loaders_end_together(mesh: str, zero: int) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)

    def run(transport: Transport) -> Outcome:
        engine = engine_of(transport, plan)
        needs_data = engine.needs_inputs or engine.needs_targets
        results = [
            engine.step(inputs, targets)
            for inputs, targets in drained(loader(engine.replica) if needs_data else None, engine)
        ]
        return outcome(results, engine)

    require_equal(run_local(plan.mesh.size, run), train_alone(small_gpt(), STEPS))


def test_a_step_in_which_nobody_has_samples_is_refused_on_all_ranks() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2)

    def run(transport: Transport) -> float:
        engine = engine_of(transport, plan)
        inputs, targets = batches(STEPS[0], 0)[engine.replica]
        engine.step(inputs, targets)
        with pytest.raises(qs.MisfitError, match="no replica has samples"):
            engine.step(inputs[:0], targets[:0])
        return engine.step(inputs, targets).loss.item()

    assert len(set(run_local(2, run))) == 1


def test_no_more_data_waits_for_the_others() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)

    def run(transport: Transport) -> tuple[Outcome, int]:
        engine = engine_of(transport, plan)
        results = [engine.step(*batch) for batch in loader(engine.replica)]
        later = engine.no_more_data(results.append)
        assert engine.state_dict()["engine.step"] == len(STEPS)
        return outcome(results, engine), later

    found = run_local(4, run)
    assert [later for _, later in found] == [0, 0, 2, 2]
    require_equal([run for run, _ in found], train_alone(small_gpt(), STEPS))


def test_replicas_that_share_experts_compute_units_without_samples() -> None:
    data = DataSpec(input_shape=(LONGEST,), num_classes=CLASSES)
    blocks = moe_gpt(data, MoEGPTOptions(hidden=8, depth=2, heads=2, experts=4, balance=0, z=0))
    plan = qs.compile("1f1b", mesh="pp=2,ep=2", microbatches=4)
    require_equal(train_on(plan, blocks, TWO), train_alone(blocks, TWO))
